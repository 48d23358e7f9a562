"""`pyshim instances select`: the instance a pod would get out of a table."""

import argparse
import json

from pyshim.instances import InvalidTable, Need, NoInstance, need_of, read_table, select
from pyshim.model.errors import InvalidArgument, NotFound


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    choose = actions.add_parser("select", help="print the smallest instance type that has what is needed")
    choose.add_argument(
        "table", metavar="TABLE.json", help="a list of {name, vcpus, memory_mib, gpus, gpu_model, price}"
    )
    choose.add_argument("--vcpus", type=int, default=0, metavar="N")
    choose.add_argument("--memory", type=int, default=0, metavar="MIB")
    choose.add_argument("--gpus", type=int, default=0, metavar="N")
    choose.add_argument("--gpu-model", default="", metavar="TEXT")
    choose.add_argument("--machine-type", default="", metavar="NAME", help="take this type, whatever is needed")
    choose.add_argument(
        "--annotation",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="the need as a shim's CreateVM spells it, in place of the options; repeatable",
    )
    choose.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    try:
        choice = select(read_table(arguments.table), _need(arguments))
    except (InvalidTable, ValueError) as error:
        raise InvalidArgument(str(error)) from error
    except NoInstance as error:
        raise NotFound(str(error)) from error
    if arguments.json:
        print(json.dumps({"name": choice.instance.name, "reason": choice.reason}))
    else:
        print(f"{choice.instance.name}\n{choice.reason}")
    return 0


def _need(arguments: argparse.Namespace) -> Need:
    if arguments.annotation:
        return need_of(dict(text.partition("=")[::2] for text in arguments.annotation))
    if arguments.gpu_model and not arguments.gpus:
        raise ValueError("choose instance: --gpu-model without --gpus")
    return Need(
        vcpus=arguments.vcpus,
        memory_mib=arguments.memory,
        gpus=arguments.gpus,
        gpu_model=arguments.gpu_model,
        machine_type=arguments.machine_type,
    )
