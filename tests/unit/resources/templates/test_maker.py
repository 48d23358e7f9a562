"""The maker of templates, as a shim starts it."""

import subprocess
from pathlib import Path

from pyshim.host.python_child import python_command

NODE_PACKAGES = ("aiohttp", "click", "cryptography", "grpc", "psutil", "rich", "yaml")


def test_a_shim_needs_no_package_of_the_node_to_have_a_template_made(tmp_path: Path) -> None:
    """The configuration is refused before a VM would boot; the reason goes to the shim's log."""
    files = {name: str(tmp_path / name) for name in ("path", "kernel", "initrd")}
    for path in files.values():
        Path(path).touch()
    config = tmp_path / "configuration.toml"
    lines = (
        *("[hypervisor.qemu]", *(f'{name} = "{path}"' for name, path in files.items()), 'accelerator = "tcg"'),
        *('virtio_fs_daemon = "/bin/true"', "enable_mem_prealloc = true"),
        *("[factory]", "enable_template = true", f'template_path = "{tmp_path}/templates"'),
    )
    config.write_text("\n".join(lines))
    without = f"sys.modules.update(dict.fromkeys({NODE_PACKAGES!r}))"

    done = subprocess.run(
        python_command(f"{without}; from pyshim.template_maker import main; main({str(config)!r})"),
        stderr=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )

    assert "no template made" in done.stderr
    assert "a VM of it has to boot: its memory is set aside" in done.stderr
