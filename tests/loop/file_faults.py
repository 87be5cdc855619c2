"""Make file operations fail, be slow or have no effect, in real runs of the launcher; Linux.

A preloaded library (LD_PRELOAD) intercepts calls of the C library. FILE_FAULTS lists the calls that
get a fault, one per line: operation, effect, pattern of the path, occurrence. The effect is the
name of an errno, "none" (the call returns 0 and does nothing) or milliseconds to wait. Occurrences
are counted in each process; 0 means every occurrence. One server process imports what a run needs,
and forks each run, which reads FILE_FAULTS at each call.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from my_project.manifest import find_damage
from my_project.run_files import checkpoint_step, checkpoints

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MOST 16
static char seen[4096];
static int counts[MOST];

/* -1: go on; 0: return 0 and do nothing; else the errno */
static int fault(const char *operation, const char *path, const char *other) {
    const char *all = getenv("FILE_FAULTS");
    if (!all || !*all || !path) return -1;
    if (strncmp(seen, all, sizeof seen - 1)) {
        strncpy(seen, all, sizeof seen - 1);
        memset(counts, 0, sizeof counts);
    }
    char text[4096], *rest = text, *line;
    strncpy(text, all, sizeof text - 1);
    text[sizeof text - 1] = 0;
    for (int i = 0; i < MOST && (line = strsep(&rest, "\n")); i++) {
        char name[64], effect[64], pattern[512];
        int number;
        if (sscanf(line, "%63s %63s %511s %d", name, effect, pattern, &number) != 4) continue;
        if (strcmp(name, operation)) continue;
        if (fnmatch(pattern, path, 0) && (!other || fnmatch(pattern, other, 0))) continue;
        if (number && __sync_add_and_fetch(&counts[i], 1) != number) continue;
        if (!strcmp(effect, "none")) return 0;
        if (strncmp(effect, "ms", 2)) return atoi(effect);
        long ms = atol(effect + 2);
        struct timespec wait = {ms / 1000, ms % 1000 * 1000000};
        nanosleep(&wait, NULL);
    }
    return -1;
}

static const char *path_of(int fd, char *buffer) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, buffer, 4095);
    buffer[length < 0 ? 0 : length] = 0;
    return buffer;
}

static const char *path_at(int fd, const char *path, char *buffer) {
    if (!path || path[0] == '/' || fd == AT_FDCWD) return path;
    path_of(fd, buffer);
    size_t length = strlen(buffer);
    snprintf(buffer + length, 4096 - length, "/%s", path);
    return buffer;
}

static int is_folder(const char *path) {
    struct stat about;
    return !lstat(path, &about) && S_ISDIR(about.st_mode);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define STRIKE(operation, path, other)                          \
    do {                                                        \
        int number = fault(operation, path, other);             \
        if (number > 0) { errno = number; return -1; }          \
        if (number == 0) return 0;                              \
    } while (0)

int fsync(int fd) {
    char buffer[4096];
    struct stat about;
    int folder = !fstat(fd, &about) && S_ISDIR(about.st_mode);
    STRIKE(folder ? "fsync_folder" : "fsync_file", path_of(fd, buffer), NULL);
    return NEXT(fsync)(fd);
}

int rename(const char *from, const char *to) {
    const char *kind = access(to, F_OK) ? "rename_file" : "replace_file";
    STRIKE(is_folder(from) ? "rename_folder" : kind, to, from);
    return NEXT(rename)(from, to);
}

static const char *open_kind(int flags) {
    if (flags & O_CREAT && flags & O_EXCL) return "open_new";
    return flags & (O_WRONLY | O_RDWR | O_CREAT) ? "open_to_write" : "open_to_read";
}

#define OPEN(name)                                              \
    int name(const char *path, int flags, ...) {                \
        va_list more;                                           \
        va_start(more, flags);                                  \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more);                                           \
        int number = fault(open_kind(flags), path, NULL);    \
        if (number > 0) { errno = number; return -1; }          \
        return NEXT(name)(path, flags, mode);                   \
    }
OPEN(open)
OPEN(open64)

#define LOCK_BY(name)                                           \
    int name(int fd, int command, ...) {                        \
        va_list more;                                           \
        va_start(more, command);                                \
        void *argument = va_arg(more, void *);                  \
        va_end(more);                                           \
        char buffer[4096];                                      \
        if (command == F_SETLK || command == F_SETLKW)          \
            STRIKE("lock", path_of(fd, buffer), NULL);          \
        return NEXT(name)(fd, command, argument);               \
    }
LOCK_BY(fcntl)
LOCK_BY(fcntl64)

int flock(int fd, int operation) {
    char buffer[4096];
    STRIKE("lock", path_of(fd, buffer), NULL);
    return ((int (*)(int, int))dlsym(RTLD_NEXT, "flock"))(fd, operation);
}

ssize_t write(int fd, const void *data, size_t size) {
    char buffer[4096];
    int number = fault("write", path_of(fd, buffer), NULL);
    if (number > 0) { errno = number; return -1; }
    return number ? NEXT(write)(fd, data, size) : (ssize_t)size;
}

int mkdir(const char *path, mode_t mode) {
    STRIKE("mkdir", path, NULL);
    return NEXT(mkdir)(path, mode);
}

int unlink(const char *path) {
    STRIKE("unlink", path, NULL);
    return NEXT(unlink)(path);
}

int rmdir(const char *path) {
    STRIKE("rmdir", path, NULL);
    return NEXT(rmdir)(path);
}

int unlinkat(int fd, const char *path, int flags) {
    char buffer[4096];
    STRIKE(flags & AT_REMOVEDIR ? "rmdir" : "unlink", path_at(fd, path, buffer), NULL);
    return NEXT(unlinkat)(fd, path, flags);
}

int utimensat(int fd, const char *path, const struct timespec times[2], int flags) {
    char buffer[4096];
    if (!path || !faccessat(fd, path, F_OK, 0)) STRIKE("utime", path_at(fd, path, buffer), NULL);
    return NEXT(utimensat)(fd, path, times, flags);
}
"""
TIMEOUT_SECONDS = 240
# By name: what is started (a new run; one that was killed at step 5; that one with --resume never),
# the faults, the exit codes that are right, and what the output must say.
Case = tuple[str, str, tuple[int, ...], str]
NO_LOCKS, NOT_SAVED, REFUSED = "has no file locks", "could not be saved", "cannot be written to"
NO_SAVE = "no save would work"
CASES: dict[str, Case] = {
    # ---- a start
    "no fsync of folders": ("new", "fsync_folder EINVAL * 0", (0,), ""),
    "fsync of folders is not supported": ("new", "fsync_folder ENOTSUP * 0", (0,), ""),
    "fsync of folders fails": ("new", "fsync_folder EIO * 0", (1,), NO_SAVE),
    "no rename of folders": ("new", "rename_folder EINVAL * 0", (2,), NO_SAVE),
    "no rename of files": ("new", "rename_file ENOTSUP *runs/* 0", (2,), REFUSED),
    "no rename over files": ("new", "replace_file EACCES *runs/* 0", (2,), NO_SAVE),
    "no folders": ("new", "mkdir EACCES */tiny/.* 0", (2,), NO_SAVE),
    "no fsync of files": ("new", "fsync_file EIO */tiny/* 0", (1,), REFUSED),
    "nothing is removed": ("new", "rmdir EACCES */tiny/* 0", (2,), NO_SAVE),
    "full": ("new", "write ENOSPC *runs/*/* 0", (2,), REFUSED),
    "read-only": ("new", "open_to_write EROFS *runs/* 0", (2,), REFUSED),
    "checkpoints/ is read-only": ("half", "mkdir EROFS */checkpoints/* 0", (2,), NO_SAVE),
    "stale": ("half", "open_to_write ESTALE */tiny/* 0", (1,), REFUSED),
    "no locks": ("new", "lock ENOLCK * 0", (0,), NO_LOCKS),
    "locks are not supported": ("new", "lock ENOTSUP * 0", (0,), NO_LOCKS),
    "locks are not there": ("new", "lock ENOSYS * 0", (0,), NO_LOCKS),
    "locks have no effect": ("new", "lock none * 0", (0,), NO_LOCKS),
    "no new files": ("new", "open_new EACCES *runs/* 0", (0, 2), ""),
    "no times of files": ("new", "utime EPERM *runs/* 0", (0, 2), ""),
    "times of files have no effect": ("new", "utime none * 0", (0,), ""),
    "slow": ("new", "fsync_file 50 * 0\nopen_to_write 20 *runs/* 0", (0,), ""),
    "no status": ("new", "rename_file EIO *status.json 0", (0, 1, 2), "status.json"),
    "no new status": ("half", "replace_file EIO *status.json 0", (0, 1, 2), "status.json"),
    "no run.json": ("half", "replace_file EIO *run.json 0", (1,), REFUSED),
    "no logs": ("new", "open_to_write ENOSPC */logs/* 0", (0, 2), ""),
    # ---- a save
    "a full save": ("half", "write ENOSPC *step_00000006* 0", (0,), NOT_SAVED),
    "a cut save": ("half", "write EIO *step_00000006* 2", (0,), NOT_SAVED),
    "a save without fsync": ("half", "fsync_file EIO *step_00000006* 0", (0,), NOT_SAVED),
    "a save without a folder": ("half", "mkdir ESTALE *step_00000006* 0", (0,), NOT_SAVED),
    "a save without a rename": ("half", "rename_folder EIO *step_00000006 0", (0,), NOT_SAVED),
    "no results in a save": ("half", "replace_file EIO *manifest.json 0", (0,), NOT_SAVED),
    "the last save": ("half", "rename_folder EIO *step_00000008 0", (1,), NOT_SAVED),
    "all saves": ("new", "write ENOSPC *step_0000000[0-9]*/model* 0", (1,), NOT_SAVED),
    "records": ("half", "write ENOSPC *metrics.jsonl 0", (0,), "cannot be written"),
    "one record": ("half", "write EIO *metrics.jsonl 2", (0,), "cannot be written"),
    # ---- a rotation
    "a rotation": ("half", "rename_folder EIO *step_00000002* 0", (0,), "could not be removed"),
    "a rotation that removes nothing": ("half", "unlink EACCES *step_00000002* 0", (0,), ""),
    "a rotation that leaves a folder": ("half", "rmdir EBUSY *step_00000002* 0", (0,), ""),
    # ---- an export
    "an export without a rename": ("half", "rename_folder EIO */export 0", (1,), NOT_SAVED),
    "a full export": ("half", "write ENOSPC */.export_*.partial/* 0", (1,), NOT_SAVED),
    "an export without fsync": ("half", "fsync_folder EIO */.export_*.partial 0", (1,), NOT_SAVED),
    "best": ("half", "write ENOSPC */.best_*.partial/* 0", (0, 1), ""),
    # ---- --resume never
    "nothing is moved aside": ("never", "mkdir EACCES *tiny.old-1 0", (2,), REFUSED),
    "checkpoints stay": ("never", "rename_folder EIO *old-1/checkpoints 0", (1,), REFUSED),
    "files stay": ("never", "rename_file EIO *old-1/config.yaml 0", (1,), REFUSED),
}
CONFIG = """\
run_name: tiny
recipe: {class_path: ragged.Ragged, init_args: {fault_on_rank: 0}}
batches: {global_batch_size: 16, micro_batch_size: 8, workers: 0}
steps: 8
evaluation: {every_steps: 4, best_metric: validation/auroc}
checkpoints: {every_steps: 2}
telemetry: {every_steps: 1, trackers: []}
checks: {recipe: off, data: off, code: off}
"""


def compiled(folder: Path) -> Path:
    """Compile the library, or skip the test."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler")
    source, library = folder / "file_faults.c", folder / "file_faults.so"
    source.write_text(SOURCE)
    command = [compiler, "-shared", "-fPIC", "-O1", "-w", "-o", library, source, "-ldl"]
    subprocess.run(command, check=True)
    return library


def numbered(faults: str) -> str:
    """Return faults with the numbers of their errors, and one that waits with its ms."""
    lines = []
    for line in filter(None, faults.splitlines()):
        operation, effect, pattern, number = line.split()
        effect = f"ms{effect}" if effect.isdigit() else str(getattr(errno, effect, effect))
        lines.append(f"{operation} {effect} {pattern} {number}")
    return "\n".join(lines)


class Runs:
    """Runs of the launcher in one process, each with faults of its own, below a folder."""

    def __init__(self, folder: Path, where: Path) -> None:
        self.folder = folder
        self.flags = ["--config_file", str(where), "--max_restarts", "0"]
        more = {"LD_PRELOAD": str(compiled(folder)), "PYTHONUNBUFFERED": "1"}
        (folder / "tiny.yaml").write_text(CONFIG)
        self.server = subprocess.Popen(
            [sys.executable, __file__], cwd=folder, env=dict(os.environ) | more, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, **what: Any) -> Any:
        assert self.server.stdin
        assert self.server.stdout
        print(json.dumps(what), file=self.server.stdin, flush=True)
        return json.loads(self.server.stdout.readline())

    def start(self, name: str, *words: str, faults: str = "", log: str = "", **more: str) -> int:
        """Start a run below runs/<name>/; its output goes to <name>.log. Return its process."""
        arguments = [*self.flags, "-m", "my_project.train", "--config", "tiny.yaml"]
        arguments += ["--runs_folder", f"runs/{name}", *words]
        environment = {"FILE_FAULTS": numbered(faults)} | more
        return self.ask(arguments=arguments, log=f"{log or name}.log", environment=environment)

    def end(self, process: int) -> int | None:
        """Wait for a run; return its exit code, None where it hung."""
        return self.ask(wait=process)

    def run(self, name: str, *words: str, faults: str = "", **more: str) -> tuple[int | None, str]:
        """Run to the end; return the exit code and the output."""
        code = self.end(self.start(name, *words, faults=faults, **more))
        return code, (self.folder / f"{name}.log").read_text(errors="replace")

    def path(self, name: str) -> Path:
        """Return the run folder."""
        return self.folder / "runs" / name / "tiny"

    def digest(self, name: str) -> str:
        """Return a hash of the exported weights, and of those of best/."""
        parts = (self.path(name) / part / "model.safetensors" for part in ("export", "best"))
        return hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()

    def close(self) -> None:
        """End the server."""
        self.server.communicate(timeout=60)


def prepare(runs: Runs) -> str:
    """Train the reference, and a run that is killed at step 5; return the digest of the first."""
    assert runs.run("reference")[0] == 0
    kill = ("--recipe.fault", "leave", "--recipe.fault_at", "5", "--checkpoints.background=false")
    assert runs.run("half", *kill)[0] == 1
    assert [checkpoint_step(path) for path in checkpoints(runs.path("half"))] == [2, 4]
    return runs.digest("reference")


def what_is_wrong(runs: Runs, name: str, digest: str) -> str:
    """Run a case, and the same again without its faults; return what is wrong, or ""."""
    start, faults, codes, says = CASES[name]
    name = name.replace(" ", "_").replace("/", "")
    if start != "new":
        shutil.copytree(runs.path("half"), runs.path(name))
    words = ("--resume", "never") if start == "never" else ()
    code, shown = runs.run(name, *words, faults=faults)
    digest_then = runs.digest(name) if code == 0 else ""
    left = [*runs.path(name).parent.glob("tiny*")]
    intact = [p for folder in left for p in checkpoints(folder) if not find_damage(p)]
    is_lost = start != "new" and max(map(checkpoint_step, intact), default=0) < 4
    is_told = not code or re.search("^(error: |--- failed)", shown, re.MULTILINE)
    after = "" if code not in codes else runs.run(name, *words)
    problems = {
        f"exit code {code}, not one of {codes}": code not in codes,
        f"it does not say {says}": not re.search(says, shown),
        "it ends without a sentence": not is_told,
        "the weights are others": code == 0 and digest_then != digest,
        f"the checkpoint of step 4 is lost: {intact}": is_lost,
        f"without faults it does not finish, with the same weights: {after}": bool(after)
        and (after[0] != 0 or runs.digest(name) != digest),
    }
    found = "; ".join(problem for problem, is_there in problems.items() if is_there)
    return f"{found}\n{shown[-3000:]}" if found else ""


def intervals(folder: Path) -> list[dict[str, Any]]:
    """Return the records of steps."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "interval"]


def run_forked(asked: dict[str, Any]) -> int:
    """Start a run in a child process; return its process number."""
    sys.stdout.flush()
    if child := os.fork():
        return child
    code = 1
    try:
        os.setsid()
        os.environ.update(asked["environment"])
        log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for number in (1, 2):
            os.dup2(log, number)
        from my_project import exits
        from my_project.launching import launch

        tempfile.tempdir = None  # so that it is searched for again
        exits.run(launch.main, asked["arguments"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def wait_for(child: int) -> int | None:
    """Return the exit code of a run; end one that hangs, and return None."""

    def give_up(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(TIMEOUT_SECONDS)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except TimeoutError:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None
    finally:
        signal.alarm(0)


def serve() -> None:
    """Start the run, or wait for the one, that each line asks for, and answer with a number."""
    from my_project.launching import launch
    from my_project.settings import parse

    launch.prepare_environment()
    launch.import_all(parse(["--config", "tiny.yaml"]))
    for line in sys.stdin:
        asked = json.loads(line)
        answer = wait_for(asked["wait"]) if "wait" in asked else run_forked(asked)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
