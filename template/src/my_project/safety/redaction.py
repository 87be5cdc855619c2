"""Keep secrets out of the files and the output of a run.

A setting is a secret if its name ends in token, password, passwd, passphrase, secret or api key
(also access, secret or private key), as in hub_token, --api-key, hftoken, secrets or token_1; other
names do not count (token_count, secretary). `tokens` counts only after a word such as access
(access_tokens, not max_tokens). Special tokens of a tokenizer are not secrets: names such as
eos_token, and values of a field ending in token that are in brackets (<image>, [INST]) or have
fewer than 6 characters.

Settings that hold secrets are refused. In text, secrets are masked; so are values named
credentials, pwd or authorization, and bearer tokens. A secret without such a name is found only if
it is the value of a secret environment variable or option and has at least 8 characters.
"""

import dataclasses
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

MASK = "***"
SECRET_END = re.compile(
    "(password|passwd|passphrase|secret|(api|access|secret|private)_?key)s?$|tokens?$"
)
MASKED_END = re.compile("(credentials?|pwd|authorization)$")
ACCESS_TOKENS = """
access api auth bearer git github gitlab hf hub huggingface private refresh secret session user
wandb
"""
SPECIAL_TOKENS = """
answer bos cls end eos image initializer lang language mask max min next pad padding placeholder
sep soft start stop trigger unk
"""
# The environment variables that run.json records; others may be tokens and passwords.
RECORDED_VARIABLES = """
CUDA_VISIBLE_DEVICES CUDA_LAUNCH_BLOCKING CUBLAS_WORKSPACE_CONFIG OMP_NUM_THREADS
PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF SLURM_JOB_ID SLURM_JOB_NUM_NODES SLURM_RESTART_COUNT
WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME FI_EFA_USE_HUGE_PAGE
NCCL_ALGO NCCL_BUFFSIZE NCCL_CROSS_NIC NCCL_CUMEM_ENABLE NCCL_DEBUG NCCL_DEBUG_SUBSYS
NCCL_IB_DISABLE NCCL_IB_GID_INDEX NCCL_IB_HCA NCCL_IB_QPS_PER_CONNECTION NCCL_IB_RETRY_CNT
NCCL_IB_SL NCCL_IB_TC NCCL_IB_TIMEOUT NCCL_MAX_NCHANNELS NCCL_MIN_NCHANNELS NCCL_NET
NCCL_NET_GDR_LEVEL NCCL_NET_PLUGIN NCCL_NSOCKS_PERTHREAD NCCL_NVLS_ENABLE NCCL_P2P_DISABLE
NCCL_P2P_LEVEL NCCL_PROTO NCCL_SHM_DISABLE NCCL_SOCKET_FAMILY NCCL_SOCKET_IFNAME
NCCL_SOCKET_NTHREADS NCCL_TOPO_FILE
TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RESTART_COUNT TORCH_DISABLE_SHARE_RDZV_TCP_STORE
TORCH_DISTRIBUTED_DEBUG TORCH_ELASTIC_SHUTDOWN_TIMEOUT TORCH_FR_BUFFER_SIZE
TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_AVOID_RECORD_STREAMS TORCH_NCCL_BLOCKING_WAIT
TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_NCCL_ENABLE_MONITORING TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC
ACCELERATE_CPU_AFFINITY ACCELERATE_DOWNCAST_BF16 ACCELERATE_DYNAMO_BACKEND
ACCELERATE_DYNAMO_MODE ACCELERATE_DYNAMO_USE_DYNAMIC ACCELERATE_DYNAMO_USE_FULLGRAPH
ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION ACCELERATE_GRADIENT_ACCUMULATION_STEPS
ACCELERATE_MIXED_PRECISION ACCELERATE_USE_CPU ACCELERATE_USE_FSDP
ACCELERATE_USE_PARALLELISM_CONFIG
FSDP_ACTIVATION_CHECKPOINTING FSDP_AUTO_WRAP_POLICY FSDP_BACKWARD_PREFETCH
FSDP_CPU_RAM_EFFICIENT_LOADING FSDP_FORWARD_PREFETCH FSDP_MIN_NUM_PARAMS FSDP_OFFLOAD_PARAMS
FSDP_RESHARD_AFTER_FORWARD FSDP_SHARDING_STRATEGY FSDP_STATE_DICT_TYPE FSDP_SYNC_MODULE_STATES
FSDP_TRANSFORMER_CLS_TO_WRAP FSDP_USE_ORIG_PARAMS FSDP_VERSION
PARALLELISM_CONFIG_CP_SIZE PARALLELISM_CONFIG_DP_REPLICATE_SIZE PARALLELISM_CONFIG_DP_SHARD_SIZE
PARALLELISM_CONFIG_SP_SIZE PARALLELISM_CONFIG_TP_SIZE
"""
NAMED = re.compile(  # name=value, 'name': 'value', --name value
    r"""(?P<name>(?<![\w.-])(?P<option>--)?[\w.-]*
        (?:token|password|passwd|passphrase|secret|key|credential|pwd|authorization)s?[_\d]*)
    (?P<sign>["']?\s*[=:]\s*["']?|(?(option)(?:["'],\s*["']|\s+(?!-)["']?)|(?!)))
    (?P<value>(?:(?:bearer|basic)\s+)?(?:(?<=")[^"]*|(?<=')[^']*|[^\s"',;&)}\]]+))""",
    re.IGNORECASE | re.VERBOSE,
)
NAME = re.compile(r"""(?<![\w.-])[\w.-]+(?=["']?\s*[=:])""")
BEARER = re.compile(r"(?<=\bbearer )(?=\S*\d)[\w.~+/=-]{8,}", re.IGNORECASE)
# Credentials in a URL, up to the last @, since a password may have any character; not host:port/.
IN_URL = re.compile(r"(?<=://)(?!git@)(?:[^/\s?#:@]*:(?!:|\d{1,5}[/?#])\S{0,300}|[^/\s?#:]+)(?=@)")


@cache
def is_secret(name: str) -> bool:
    """Return whether a setting, option or variable of this name is a secret."""
    name = _words(name)
    found = SECRET_END.search(name)
    if found and found[0].startswith("token"):
        *_, before = ["", *name[: found.start()].rstrip("_").split("_")]
        if found[0] == "tokens":
            return before in ACCESS_TOKENS.split()
        return before not in SPECIAL_TOKENS.split()
    return bool(found)


def _is_masked(name: str) -> bool:
    return is_secret(name) or bool(MASKED_END.search(_words(name)))


def _words(name: str) -> str:
    """Return a name in snake_case, without a number at the end."""
    words = re.findall("[a-z0-9]+", re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return "_".join(words).rstrip("_0123456789")


def mask(text: str) -> str:
    """Mask secrets in a text: values after their names, credentials in URLs, and known values."""
    return NAMED.sub(_mask_value, _mask_unnamed(text))


def _mask_unnamed(text: str) -> str:
    for value in sorted(_known(), key=len, reverse=True):
        text = text.replace(value, MASK)
    return IN_URL.sub(MASK, BEARER.sub(MASK, text))


def mask_command(arguments: Iterable[str]) -> list[str]:
    """Mask secrets in the arguments of a command.

    The argument after a secret option is always masked; an argument that contains a secret's name,
    such as YAML, is masked as a whole.
    """
    masked = []
    is_next = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if is_next:
            masked.append(MASK)
        elif equals and re.fullmatch(r"[\w.+-]+", name) and _is_masked(name):
            masked.append(f"{name}={MASK}")
        elif any(map(_is_masked, NAME.findall(value if name.startswith("--") else argument))):
            masked.append(f"{name}={MASK}" if equals and name.startswith("--") else MASK)
        else:
            masked.append(mask(argument))
        is_next = name.startswith("-") and not equals and _is_masked(name)
    return masked


def _mask_value(found: re.Match[str]) -> str:
    return found["name"] + found["sign"] + MASK if _is_masked(found["name"]) else found[0]


def _known() -> Iterator[str]:
    """Yield the secrets in the environment and on the command line."""
    for name, value in os.environ.items():
        if is_secret(name) and len(value) >= 8:
            yield value
    for argument, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if name.startswith("--") and is_secret(name):
            value = value if equals else following
            if len(value) >= 8:
                yield value


class MaskedFormatter(logging.Formatter):
    """A log formatter that masks secrets in messages and tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as masked text."""
        return mask(super().format(record))


def secrets_in(settings: Any, name: str = "", of: str = "") -> Iterator[str]:
    """Yield the dotted names of the settings that hold a secret.

    Secrets are the strings and bytes under a secret's name, and numbers unless the name ends in
    token, also in lists, sets, groups and dictionaries; and any string with credentials in a URL or
    with a value that is known from the environment. Other text may contain names of secrets, as a
    prompt does ("Password: ...").

    Args:
        settings: a dataclass, or the value of a setting.
        name: the dotted name of the setting.
        of: the innermost secret's name above the setting.
    """
    of = name if is_secret(name) else of
    is_token = _words(of).endswith(("token", "tokens", "secrets"))
    if dataclasses.is_dataclass(settings):
        settings = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    if isinstance(settings, dict):
        for key, value in settings.items():
            yield from secrets_in(value, f"{name}.{key}" if name else str(key), of)
    elif isinstance(settings, (list, tuple, set, frozenset)):
        for value in settings:
            yield from secrets_in(value, name, of)
    elif isinstance(settings, str) and settings:
        is_special = len(settings) < 6 or re.fullmatch(r"[<\[].*[>\]]", settings)
        if (of and not (is_token and is_special)) or _mask_unnamed(settings) != settings:
            yield name
    elif of and settings:
        is_number = type(settings) in (int, float)
        if isinstance(settings, bytes) or (is_number and not is_token):
            yield name


def secrets_problem(settings: Any) -> str:
    """Return the message that refuses settings with a secret; empty if there is none."""
    for name in secrets_in(settings):
        return (
            f"{name} holds a secret, which config.yaml and the list of processes would show: leave"
            f" it empty and set the environment variable {variable_for(name)}, or give the path of"
            f" a file with the secret in a field such as {name.rpartition('.')[2]}_file."
        )
    return ""


def variable_for(name: str) -> str:
    """Return the name of the environment variable for a secret."""
    words = set(re.findall("[a-z]+", name.lower()))
    if words & {"hf", "hub", "huggingface"}:
        return "HF_TOKEN"
    return "WANDB_API_KEY" if "wandb" in words else name.rpartition(".")[2].upper()
