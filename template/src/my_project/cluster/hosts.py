"""Write one accelerate config per node from a host list, as an alternative to flags.

    python -m my_project hosts hosts.txt --where accelerate_configs/multi_node.yaml

hosts.txt holds a host per line, the main node first, and how many processes (GPUs) it runs:

    gpu-a slots=8
    gpu-b slots=8

Then, on each node, with its own number:

    accelerate launch --config_file nodes/node_0.yaml -m my_project.train ...
"""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from ..cli import make_parser, run
from ..config import ConfigError, read_yaml


@dataclass(frozen=True, kw_only=True)
class Host:
    """A node."""

    name: str
    slots: int  # processes


def read_hosts(text: str) -> list[Host]:
    """Read a host list.

    Raises:
        ConfigError: a line that is none, a host twice, or nodes of unequal size.
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
            raise ConfigError(f"line {number}: {found[1]} stands in the list twice; name it once.")
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
    """Make the text of each node's config, by file name."""
    import yaml

    plain = read_yaml(where)
    slots = hosts[0].slots
    if plain.get("num_machines", 1) < 2:
        raise ConfigError(f"{where} is for one machine; choose one of multi_node*.yaml.")
    if len(hosts) * slots < 2:
        raise ConfigError("one node with one process needs no such file: use gpu.yaml or cpu.yaml.")
    plain |= {
        "num_machines": len(hosts),
        "num_processes": len(hosts) * slots,
        "main_process_ip": address or hosts[0].name,
        "main_process_port": port,
    }
    if str(plain.get("gpu_ids", "")).startswith("-1"):
        plain["gpu_ids"] = ",".join(["-1"] * slots)
    if "parallelism_config" in plain:
        plain["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": len(hosts),
            "parallelism_config_dp_shard_size": slots,
        }
    written = {}
    for number, host in enumerate(hosts):
        head = f"# Node {number} of {len(hosts)}, {host.name}; made from {where.name}.\n"
        body = yaml.safe_dump(plain | {"machine_rank": number}, sort_keys=False)
        written[f"node_{number}.yaml"] = head + body
    return written


def main(arguments: argparse.Namespace) -> None:
    """Write the files; none that exists with another content is overwritten."""
    for path in (Path(arguments.hosts), Path(arguments.where)):
        if not path.is_file():
            raise ConfigError(f"{path} is no file.")
    hosts = read_hosts(Path(arguments.hosts).read_text(encoding="utf-8"))
    if arguments.list:
        print(*(f"{host.name} {host.slots}" for host in hosts), sep="\n")
        return
    written = configs(hosts, Path(arguments.where), arguments.address, arguments.port)
    folder = Path(arguments.folder)
    for name, text in written.items():
        if (folder / name).exists() and (folder / name).read_text(encoding="utf-8") != text:
            raise ConfigError(f"{folder / name} exists and differs; give another --folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in written.items():
        (folder / name).write_text(text, encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("hosts", help="the host list")
    parser.add_argument("--where", default="accelerate_configs/multi_node.yaml")
    parser.add_argument("--list", action="store_true", help="print the hosts, write nothing")
    parser.add_argument("--folder", default="nodes", help="where the files go")
    parser.add_argument("--address", default="", help="of the main node, if not its name")
    parser.add_argument("--port", type=int, default=29500)
    run(main, parser.parse_args())
