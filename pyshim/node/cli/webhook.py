"""`pyshim webhook serve|manifests`: the admission webhook, and what a cluster needs to call it."""

import asyncio
import datetime
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import click
from msgspec.structs import replace

from pyshim import log
from pyshim.config.sources import named_file, read_source
from pyshim.model.errors import InvalidArgument
from pyshim.model.host_facts import HostFacts, unbounded
from pyshim.node.cli.output import examples
from pyshim.node.webhook.review import PodClass
from pyshim.resources.probe import probe_host


def _named_files(_ctx: click.Context, _parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not (name and equals and path) or name in found:
            raise click.BadParameter(f"{text!r} is not NAME=FILE with a name of its own")
        found[name] = path
    return found


def _address(_ctx: click.Context, _parameter: click.Parameter, text: str) -> tuple[str, int]:
    host, _colon, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise click.BadParameter(f"{text!r} is not ADDRESS:PORT")
    return host.strip("[]"), int(port)


def _https(_ctx: click.Context, _parameter: click.Parameter, url: str | None) -> str | None:
    if url is not None:
        parts = urlsplit(url)
        if parts.scheme != "https" or not parts.hostname or parts.query or parts.fragment:
            raise click.BadParameter(f"{url!r} is not https://HOST[:PORT][/PATH]")
    return url


_class_option = click.option(
    "--class",
    "classes",
    multiple=True,
    required=True,
    callback=_named_files,
    metavar="NAME=FILE",
    help="A runtime class and the configuration its nodes have; may be repeated.",
)


@click.group(
    epilog=examples(
        "pyshim webhook manifests --image REGISTRY/pyshim:1 --class pykata=/etc/pyshim/configuration.toml",
    )
)
def command() -> None:
    """Make pods' VMs as large as their requests and warn about what does not fit, as Kubernetes creates the pods."""


@command.command()
@_class_option
@click.option(
    "--drop-in",
    "drop_ins",
    multiple=True,
    callback=_named_files,
    metavar="NAME=FILE",
    help="Settings on top of those of a class's FILE; may be repeated.",
)
@click.option("--certificate", required=True, metavar="FILE", help="PEM, with the chain; read again when it changes.")
@click.option("--key", required=True, metavar="FILE", help="PEM, without a password.")
@click.option(
    "--listen", default="0.0.0.0:8443", show_default=True, callback=_address, metavar="ADDRESS:PORT", help="Where."
)
@click.option("--node-cpus", type=click.IntRange(min=1), metavar="N", help="Of the largest node; default: not checked.")
@click.option("--node-memory", type=click.IntRange(min=1), metavar="MIB", help="The same; default: not checked.")
@click.option(
    "--node-kvm",
    type=click.Choice(["yes", "no"]),
    default="yes",
    show_default=True,
    help="Whether nodes have hardware virtualization.",
)
@click.option(
    "--host-side",
    type=click.IntRange(min=0),
    metavar="MIB",
    help="Memory of VMM, file server and shim beside guest RAM; default: as measured, by --node-kvm.",
)
def serve(
    classes: dict[str, str],
    drop_ins: dict[str, str],
    certificate: str,
    key: str,
    listen: tuple[str, int],
    node_cpus: int | None,
    node_memory: int | None,
    node_kvm: str,
    host_side: int | None,
) -> int:
    """Serve /mutate, /validate, /healthz and /metrics over HTTPS, until SIGTERM.

    The configurations are read once; restart the server when they change.
    """
    from pyshim.node.webhook.certificate import Certificate
    from pyshim.node.webhook.server import Limits
    from pyshim.node.webhook.server import serve as serve_webhook

    log.set_up(debug=False)
    unknown = unbounded(probe_host())
    node = replace(
        unknown,
        cpu_count=node_cpus or unknown.cpu_count,
        memory_mib=node_memory or unknown.memory_mib,
        kvm_usable=node_kvm == "yes",
    )
    found = pod_classes(classes, node, host_side, drop_ins)
    host, port = listen
    asyncio.run(serve_webhook(found, Certificate(certificate, key), host=host, port=port, limits=Limits()))
    return 0


@command.command()
@_class_option
@click.option("--image", metavar="IMAGE", help="An image that has `pyshim`: run the webhook in the cluster.")
@click.option("--url", callback=_https, metavar="URL", help="Where a webhook outside the cluster is reached.")
@click.option("--tls-dir", metavar="DIR", help="With --url: where to write tls.crt and tls.key for that webhook.")
@click.option("--namespace", default="pyshim-system", show_default=True, metavar="NAME", help="With --image.")
@click.option("--days", type=click.IntRange(1, 3650), default=365, show_default=True, help="Life of the certificate.")
@click.option(
    "--failure-policy",
    type=click.Choice(["Ignore", "Fail"]),
    default="Ignore",
    show_default=True,
    help="What becomes of pods while the webhook cannot be reached.",
)
@click.argument("options", nargs=-1, metavar="[-- OPTIONS OF serve]")
def manifests(
    classes: dict[str, str],
    image: str | None,
    url: str | None,
    tls_dir: str | None,
    namespace: str,
    days: int,
    failure_policy: str,
    options: tuple[str, ...],
) -> int:
    """Print manifests for `kubectl apply`, with a certificate that a new authority signed, whose key is not kept."""
    import yaml

    from pyshim.node.webhook.manifests import AtUrl, InCluster
    from pyshim.node.webhook.manifests import manifests as objects
    from pyshim.node.webhook.self_signed import self_signed

    if (image is None) == (url is None) or (url is None) != (tls_dir is None):
        raise click.UsageError("give either --image, or --url with --tls-dir")
    place: InCluster | AtUrl
    if image is not None:
        texts = {name: _text(path) for name, path in classes.items()}
        place = InCluster(namespace=namespace, image=image, configurations=texts, options=options)
        host = place.host
    else:
        assert url is not None, "checked above"
        place = AtUrl(url=url)
        host = str(urlsplit(url).hostname)
    # Refuse now what the start would refuse.
    pod_classes(classes, unbounded(probe_host()), None, {})
    pair = self_signed((host,), days=days, now=datetime.datetime.now(datetime.UTC))
    if tls_dir is not None:
        _write(Path(tls_dir), {"tls.crt": pair.certificate, "tls.key": pair.key})
    yaml.safe_dump_all(objects(place, pair, tuple(classes), failure_policy=failure_policy), sys.stdout, sort_keys=False)
    return 0


def pod_classes(
    paths: Mapping[str, str], node: HostFacts, host_side_mib: int | None, drop_ins: Mapping[str, str]
) -> dict[str, PodClass]:
    """Raises ShimError for a configuration with which no pod would start, and for a drop-in of no class."""
    if foreign := sorted(drop_ins.keys() - paths.keys()):
        raise InvalidArgument(f"read drop-in '{drop_ins[foreign[0]]}': there is no class '{foreign[0]}'")
    found = {}
    for name, path in paths.items():
        on_top = (drop_ins[name],) if name in drop_ins else ()
        source = read_source(named_file(path), {}, on_top=on_top)
        found[name] = PodClass(source=source, node=node, host_side_mib=host_side_mib)
        found[name].config({})
    return found


def _text(path: str) -> str:
    """One file goes into the cluster: what lies beside it would be missing there."""
    drop_ins = os.path.join(os.path.dirname(os.path.realpath(path)), "config.d")
    if os.path.isdir(drop_ins) and os.listdir(drop_ins):
        raise InvalidArgument(f"read '{path}': '{drop_ins}' changes it; give a file that has everything")
    return Path(path).read_text(encoding="utf-8")


def _write(directory: Path, files: Mapping[str, bytes]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        new = directory / f".{name}.new"
        new.unlink(missing_ok=True)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(content)
        new.rename(directory / name)
