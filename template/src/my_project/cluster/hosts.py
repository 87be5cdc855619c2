"""Write one accelerate config per node from a host list.

    python -m my_project hosts hosts.txt --where accelerate_configs/multi_node.yaml

This is an alternative to flags. hosts.txt has a host per line, the main node first, with its number
of processes (one per GPU):

    gpu-a slots=8
    gpu-b slots=8

Then, on each node, with its own node rank:

    accelerate launch --config_file nodes/node_0.yaml -m my_project.train ...
"""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from ..cli import make_parser, run
from ..config import ConfigError, read_yaml
from ..launch import sizes_for


@dataclass(frozen=True, kw_only=True)
class Host:
    """A line of the host list."""

    name: str
    slots: int  # processes


def read_hosts(text: str) -> list[Host]:
    """Read a host list.

    Raises:
        ConfigError: a line is not a host, a host is listed twice, or the nodes differ in slots.
    """
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.split("#")[0].strip()
        if not line:
            continue
        found = re.fullmatch(r"(\S+)\s+slots=([1-9]\d*)", line)
        if not found:
            raise ConfigError(f"line {number} is {line!r}; write a host as: name slots=8.")
        if found[1] in {host.name for host in hosts}:
            raise ConfigError(f"line {number}: {found[1]} is in the list twice; remove one line.")
        hosts.append(Host(name=found[1], slots=int(found[2])))
    if not hosts:
        raise ConfigError("the host list is empty; write a host per line: name slots=8.")
    for host in hosts:
        if host.slots != hosts[0].slots:
            total = sum(h.slots for h in hosts)
            raise ConfigError(
                f"{host.name} has {host.slots} slots, but {hosts[0].name} has {hosts[0].slots}:"
                f" accelerate starts {total} // {len(hosts)} = {total // len(hosts)} processes on"
                " each node; give every node the same number."
            )
    return hosts


def configs(hosts: list[Host], where: Path, address: str, port: int) -> dict[str, str]:
    """Return the text of each node's config, by file name."""
    import yaml

    settings = read_yaml(where)
    slots = hosts[0].slots
    if settings.get("num_machines", 1) < 2:
        raise ConfigError(f"{where} is for one machine; use one of multi_node*.yaml.")
    if len(hosts) * slots < 2:
        raise ConfigError("the host list has one node with one process: use gpu.yaml or cpu.yaml.")
    settings |= {
        "num_machines": len(hosts),
        "num_processes": len(hosts) * slots,
        "main_process_ip": address or hosts[0].name,
        "main_process_port": port,
    } | sizes_for(settings, len(hosts), slots)
    texts = {}
    for node_rank, host in enumerate(hosts):
        head = f"# Node {node_rank} of {len(hosts)}, {host.name}; made from {where.name}.\n"
        body = yaml.safe_dump(settings | {"machine_rank": node_rank}, sort_keys=False)
        texts[f"node_{node_rank}.yaml"] = head + body
    return texts


def main(arguments: argparse.Namespace) -> None:
    """Write the files, unless one exists with other content."""
    for path in (Path(arguments.hosts), Path(arguments.where)):
        if not path.is_file():
            raise ConfigError(f"{path} is not a file; give an existing one.")
    hosts = read_hosts(Path(arguments.hosts).read_text(encoding="utf-8"))
    if arguments.list:
        print(*(f"{host.name} {host.slots}" for host in hosts), sep="\n")
        return
    texts = configs(hosts, Path(arguments.where), arguments.address, arguments.port)
    folder = Path(arguments.folder)
    for name, text in texts.items():
        if (folder / name).exists() and (folder / name).read_text(encoding="utf-8") != text:
            raise ConfigError(f"{folder / name} exists and differs; give another --folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("hosts", help="the host list")
    parser.add_argument("--where", default="accelerate_configs/multi_node.yaml")
    parser.add_argument("--list", action="store_true", help="print the hosts and write nothing")
    parser.add_argument("--folder", default="nodes", help="folder of the files")
    parser.add_argument(
        "--address", default="", help="address of the main node, if it is not its name"
    )
    parser.add_argument("--port", type=int, default=29500)
    run(main, parser.parse_args())
