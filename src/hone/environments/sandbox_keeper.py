"""Run a sandbox's Python session inside its namespaces. `sandbox.py` starts this through `unshare`.

    stdin {"code", "seconds"} ─► keeper, process 1 of its namespace ─ pipe ─► session, a fork without privileges
    stdout {"text"}           ◄─                                   ◄─ its output, and a byte at the end of a call

The session sees its own root directory: the system's programs and Python, read-only, and a home
directory in memory. It can start threads but no processes, so limits on one process bound the whole
sandbox, and one signal stops or kills all threads. The session is stopped between calls. A session
that dies or takes too long is replaced. Only the standard library is imported.
"""

import ast
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
import time
import tokenize  # noqa: F401  # linecache imports it late, when no descriptor may be left to open it with
import traceback

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
PR_SET_NO_NEW_PRIVS = 38
PR_CAPBSET_DROP = 24
PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP = 22
SYSTEM = (
    "/usr",
    "/lib",
    "/lib64",
    "/bin",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/dev/null",
    "/dev/urandom",
)
HOME = "/home/python"  # the session's folder
MAX_FILES = 4096  # files and directories in HOME
CLONE3 = 435
CLONE_THREAD = 0x10000
AF_INET6 = 10
# By machine: the audit number of its architecture, clone, socket, the first call newer than Linux 5.10, and the calls
# refused: fork, vfork (not on aarch64), execve, execveat, unshare, setns, mount, pivot_root, shmget, msgget, semget,
# ptrace, process_vm_readv, process_vm_writev, memfd_create, add_key, request_key, keyctl, bpf, userfaultfd,
# perf_event_open, io_uring_setup, open_tree, fsopen, pidfd_getfd.
SYSTEM_CALLS = {
    "x86_64": (
        0xC000003E, 56, 41, 441,
        (57, 58, 59, 322, 272, 308, 165, 155, 29, 68, 64, 101, 310, 311, 319, 248, 249, 250, 321,
         323, 298, 425, 428, 430, 438),
    ),
    "aarch64": (
        0xC00000B7, 220, 198, 441,
        (221, 281, 97, 268, 40, 41, 194, 186, 190, 117, 270, 271, 279, 217, 218, 219, 280, 282,
         241, 425, 428, 430, 438),
    ),
}  # fmt: skip
libc = ctypes.CDLL(None, use_errno=True)


def call_libc(name, *arguments):
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source, target, kind=None, flags=0, options=None):
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    call_libc("mount", *words, ctypes.c_ulong(flags), None if options is None else options.encode())


def enter_root(root, readable, disk):
    """Change to a new root directory with read-only `readable` paths and an empty home.

    Args:
        root: directory at which the new root is mounted.
        readable: paths that the session may read.
        disk: maximal size in bytes of the home directory, which is in memory.
    """
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in readable:
        if os.path.islink(path):
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            os.symlink(os.readlink(path), root + path)
            continue
        if not os.path.exists(path):
            continue
        if os.path.isdir(path):
            os.makedirs(root + path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            open(root + path, "w").close()
        mount(path, root + path, None, MS_BIND | MS_REC)
        kept = os.statvfs(root + path).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
        mount("none", root + path, None, MS_BIND | MS_REMOUNT | MS_RDONLY | kept)
    os.makedirs(root + HOME, exist_ok=True)
    mount_home(root + HOME, disk)
    os.chdir(root)
    call_libc("pivot_root", b".", b".")
    call_libc("umount2", b".", MNT_DETACH)
    mount("none", "/", None, MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(HOME)


def mount_home(path, disk):
    """Mount an empty tmpfs at `path`, limited to `disk` bytes and MAX_FILES files."""
    mount(
        "tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk},nr_inodes={MAX_FILES},mode=777"
    )


def filter_system_calls():
    """Install a seccomp filter for this process and its threads.

    The filter denies calls that start processes, create namespaces, mount, trace processes,
    allocate kernel memory that no limit counts, or expose kernel internals (bpf, io_uring). It
    denies sockets of families that a network namespace does not isolate (vsock). clone3 and all
    calls newer than Linux 5.10 fail as not implemented: a filter cannot read the flags of clone3,
    and the C library then uses clone.
    """
    architecture, clone, socket, first_new, refused = SYSTEM_CALLS[os.uname().machine]
    load = 0x20
    equal = 0x15
    any_bit = 0x45
    at_least = 0x35
    end = 0x06
    denied = 0x00050001
    absent = 0x00050026
    allowed = 0x7FFF0000
    rules = [(load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, denied), (load, 0, 0, 0)]
    rules += [
        (at_least, 0, 1, 0x40000000),
        (end, 0, 0, denied),
        (equal, 0, 1, CLONE3),
        (end, 0, 0, absent),
    ]
    rules += [(at_least, 0, 1, first_new), (end, 0, 0, absent)]
    for number in refused:
        rules += [(equal, 0, 1, number), (end, 0, 0, denied)]
    rules += [
        (equal, 0, 3, clone),
        (load, 0, 0, 16),
        (any_bit, 1, 0, CLONE_THREAD),
        (end, 0, 0, denied),
    ]
    rules += [
        (load, 0, 0, 0),
        (equal, 0, 3, socket),
        (load, 0, 0, 16),
        (at_least, 0, 1, AF_INET6 + 1),
        (end, 0, 0, denied),
    ]
    rules += [(end, 0, 0, allowed)]
    code = b"".join(struct.pack("HBBI", *rule) for rule in rules)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(buffer))
    call_libc("prctl", PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.c_char_p(program), 0, 0)


def give_up_privileges(limits, user):
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_FSIZE, limits["file"]),
        (resource.RLIMIT_CPU, limits["cpu"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, limits["threads"]),
    ):
        resource.setrlimit(kind, (value, value))
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    call_libc("capset", header, data)
    call_libc("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    filter_system_calls()


class Session:
    """A forked Python process that keeps its variables between calls."""

    def __init__(self, limits, user):
        ask, self.asked = os.pipe()
        self.printed, out = os.pipe()
        self.ended, end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.dup2(ask, 0), os.dup2(out, 1), os.dup2(out, 2), os.dup2(end, 3)
                os.closerange(4, 256)
                os.setsid()
                give_up_privileges(limits, user)
                serve_calls()
            finally:
                os._exit(1)
        for fd in (ask, out, end):
            os.close(fd)
        os.set_blocking(self.asked, False)

    def run(self, code, seconds, most):
        """Run code (bytes) for at most `seconds`, and keep up to `most` bytes of its output.

        Returns (output, number of bytes cut from it, how the session ended or "" if it still runs).
        """
        self.discard_output()
        os.kill(self.pid, signal.SIGCONT)
        rest = memoryview(len(code).to_bytes(8, "big") + code)
        deadline = time.monotonic() + seconds
        text = b""
        dropped = 0
        outputs = [self.printed, self.ended]
        while (left := deadline - time.monotonic()) > 0:
            can_read, can_write, _ = select.select(outputs, [self.asked] if rest else [], [], left)
            if can_write:
                with contextlib.suppress(BlockingIOError, BrokenPipeError):
                    rest = rest[os.write(self.asked, rest) :]
            if self.printed in can_read:
                new = os.read(self.printed, 1 << 16)
                if not new:  # the code has closed its output
                    outputs.remove(self.printed)
                kept = new[: max(0, most - len(text))]
                text = text + kept
                dropped = dropped + len(new) - len(kept)
            elif self.ended in can_read:
                if os.read(self.ended, 1):
                    os.kill(self.pid, signal.SIGSTOP)  # also if this byte came from the code itself
                    return text, dropped, ""
                return text, dropped, describe_death(self.end())
        self.end()
        return text, dropped, f"did not end within {seconds:g} s"

    def discard_output(self):
        """Discard output that the code wrote after the end of its call.

        The session is stopped now and cannot write more, so the loop ends.
        """
        while select.select([self.printed, self.ended], [], [], 0)[0]:
            if not any(
                os.read(fd, 1 << 16)
                for fd in (self.printed, self.ended)
                if select.select([fd], [], [], 0)[0]
            ):
                return

    def end(self):
        """Kill the session, with all its threads; return its wait status."""
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        for fd in (self.asked, self.printed, self.ended):
            os.close(fd)
        return status


def describe_death(status):
    if os.WIFEXITED(status):
        return f"ended the session (exit code {os.WEXITSTATUS(status)})"
    number = os.WTERMSIG(status)
    if number == signal.SIGXCPU:
        return "ended the session (it used all of its CPU time)"
    names = {one.value: one.name for one in signal.Signals}
    return f"ended the session ({names.get(number, f'signal {number}')})"


def serve_calls():
    names = {"__name__": "__main__"}
    while True:
        size = read_all(8)
        if size is None:
            os._exit(0)
        run_code(read_all(int.from_bytes(size, "big")).decode(), names)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os.write(3, b".")


def read_all(count):
    found = b""
    while len(found) < count:
        new = os.read(0, count - len(found))
        if not new:
            return None
        found += new
    return found


def run_code(code, names):
    try:
        tree = ast.parse(code, "<python>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<python>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<python>", "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit:
        pass
    except BaseException as error:
        sys.stdout.flush()
        frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        mine = [(code.co_name, line) for code, line in frames if code.co_filename == "<python>"]
        place = "".join(f'  File "<python>", line {line}, in {name}\n' for name, line in mine)
        said = "".join(traceback.format_exception_only(error))
        sys.stderr.write((f"Traceback (most recent call last):\n{place}" if place else "") + said)


def main():
    limits = json.loads(sys.argv[1])
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    user = limits["user"]
    readable = [*SYSTEM, *dict.fromkeys(limits["readable"])]
    enter_root(limits["root"], readable, limits["disk"])
    os.environ.clear()
    os.environ.update(
        HOME=HOME, PATH="/usr/bin:/bin", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", TMPDIR=HOME
    )
    sys.path.append(limits["packages"])
    session = Session(limits, user)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked.get("reset"):
            session.end()
            text = b""
            dropped = 0
            what = "reset"
            os.chdir("/")
            call_libc("umount2", HOME.encode(), MNT_DETACH)
            mount_home(HOME, limits["disk"])
            os.chdir(HOME)
        else:
            code = asked["code"].encode(errors="replace")
            text, dropped, what = session.run(code, asked["seconds"], limits["output"])
        if what:
            session = Session(limits, user)
        print(
            json.dumps({"text": text.decode(errors="replace"), "dropped": dropped, "what": what}),
            flush=True,
        )


if __name__ == "__main__":
    main()
