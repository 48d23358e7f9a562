"""`pyshim instances select`: the instance a pod would get out of a table."""

import click

from pyshim.instances import InvalidTable, Need, NoInstance, need_of, read_table, select
from pyshim.model.errors import InvalidArgument, NotFound
from pyshim.node.cli.output import json_option, print_json


@click.group()
def command() -> None:
    """Choose a cloud instance out of a table."""


@command.command("select")
@click.argument("table", metavar="TABLE.json")
@click.option("--vcpus", type=int, default=0, metavar="N")
@click.option("--memory", "memory_mib", type=int, default=0, metavar="MIB")
@click.option("--gpus", type=int, default=0, metavar="N")
@click.option("--gpu-model", default="", metavar="TEXT")
@click.option("--machine-type", default="", metavar="NAME", help="Take this type, whatever is needed.")
@click.option(
    "--annotation",
    "annotations",
    multiple=True,
    metavar="NAME=VALUE",
    help="The need as a shim's CreateVM spells it, in place of the options; repeatable.",
)
@json_option
def _select(
    table: str,
    vcpus: int,
    memory_mib: int,
    gpus: int,
    gpu_model: str,
    machine_type: str,
    annotations: tuple[str, ...],
    as_json: bool,
) -> int:
    """Print the smallest instance type that has what is needed.

    TABLE.json is a list of {name, vcpus, memory_mib, gpus, gpu_model, price}.
    """
    try:
        if annotations:
            need = need_of(dict(text.partition("=")[::2] for text in annotations))
        elif gpu_model and not gpus:
            raise ValueError("choose instance: --gpu-model without --gpus")
        else:
            need = Need(vcpus=vcpus, memory_mib=memory_mib, gpus=gpus, gpu_model=gpu_model, machine_type=machine_type)
        choice = select(read_table(table), need)
    except (InvalidTable, ValueError) as error:
        raise InvalidArgument(str(error)) from error
    except NoInstance as error:
        raise NotFound(str(error)) from error
    if as_json:
        print_json({"name": choice.instance.name, "reason": choice.reason})
    else:
        print(f"{choice.instance.name}\n{choice.reason}")
    return 0
