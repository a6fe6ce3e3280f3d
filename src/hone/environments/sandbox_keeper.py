"""The inner side of `sandbox.py`: started by `unshare` in namespaces of its own, with the standard library alone.

    stdin {"code", "seconds"} ─► this, process 1 of its namespace ─ pipe ─► the session, a fork without privileges
    stdout {"text"}          ◄─                                   ◄─ what it prints, and a byte when it has ended

The session sees a root directory of its own: the system's programs and Python, read-only, and a folder in memory.
What it leaves running after a call is killed. A session that dies, or takes too long, is replaced by a new one.
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
import traceback

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH, PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP, PR_SET_PDEATHSIG, PR_SET_SECCOMP = 2, 38, 24, 1, 22
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/alternatives", "/etc/ld.so.cache", "/dev/null", "/dev/urandom")
HOME = "/home/python"  # its folder
libc = ctypes.CDLL(None, use_errno=True)


def call(name, *arguments):
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source, target, kind=None, flags=0, options=None):
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    call("mount", *words, ctypes.c_ulong(flags), None if options is None else options.encode())


def enter(root, readable, disk):
    """A root directory with nothing in it but what may be read."""
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
    mount("tmpfs", root + HOME, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk},mode=777")
    os.chdir(root)
    call("pivot_root" if hasattr(libc, "pivot_root") else "syscall", *pivot_words())
    call("umount2", b".", MNT_DETACH)
    mount("none", "/", None, MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(HOME)


def pivot_words():
    if hasattr(libc, "pivot_root"):
        return b".", b"."
    return ctypes.c_long(155 if os.uname().machine == "x86_64" else 41), b".", b"."


def filter_system_calls():
    """Refuses those that make namespaces, mount, share memory that no limit counts, or reach into the kernel; clone3,
    whose flags a filter cannot see, is said not to be there, so that clone is used."""
    machine = os.uname().machine
    arch, clone, refused = {
        "x86_64": (0xC000003E, 56, (272, 308, 165, 155, 29, 68, 64, 101, 248, 250, 321, 323, 298, 425, 428, 430)),
        "aarch64": (0xC00000B7, 220, (97, 268, 40, 41, 194, 186, 190, 117, 217, 219, 280, 282, 241, 425, 428, 430)),
    }[machine]
    load, equal, any_bit, at_least, end = 0x20, 0x15, 0x45, 0x35, 0x06
    denied, absent, allowed = 0x00050001, 0x00050026, 0x7FFF0000
    rules = [(load, 0, 0, 4), (equal, 1, 0, arch), (end, 0, 0, denied), (load, 0, 0, 0)]
    rules += [(at_least, 0, 1, 0x40000000), (end, 0, 0, denied), (equal, 0, 1, 435), (end, 0, 0, absent)]
    for number in refused:
        rules += [(equal, 0, 1, number), (end, 0, 0, denied)]
    new_namespaces = 0x7E020000
    rules += [(equal, 0, 3, clone), (load, 0, 0, 16), (any_bit, 0, 1, new_namespaces), (end, 0, 0, denied)]
    rules += [(end, 0, 0, allowed)]
    code = b"".join(struct.pack("HBBI", *rule) for rule in rules)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(buffer))
    call("prctl", PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.c_char_p(program), 0, 0)


def give_up_privileges(limits, user):
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory"]), (resource.RLIMIT_FSIZE, limits["file"]),
        (resource.RLIMIT_CPU, limits["cpu"]), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_NPROC, limits["processes"]),
    ):  # fmt: skip
        resource.setrlimit(kind, (value, value))
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    call("capset", header, data)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    filter_system_calls()


class Session:
    """A Python that keeps its names from call to call."""

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
                serve()
            finally:
                os._exit(1)
        for fd in (ask, out, end):
            os.close(fd)

    def run(self, code, seconds, most):
        """What it printed, and what became of it where it did not end."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.asked, len(code).to_bytes(8, "big"))
            rest = memoryview(code)
            os.set_blocking(self.asked, False)
            deadline, text, dropped, done = time.monotonic() + seconds, b"", 0, False
            while not done:
                left = deadline - time.monotonic()
                if left <= 0:
                    return text, dropped, f"did not end within {seconds:g} s"
                can_read, can_write, _ = select.select(
                    [self.printed, self.ended], [self.asked] if rest else [], [], left
                )
                if can_write:
                    with contextlib.suppress(BlockingIOError):
                        rest = rest[os.write(self.asked, rest) :]
                if self.printed in can_read:
                    new = os.read(self.printed, 1 << 16)
                    kept = new[: max(0, most - len(text))]
                    text, dropped = text + kept, dropped + len(new) - len(kept)
                    if new:
                        continue
                if self.ended in can_read:
                    done = bool(os.read(self.ended, 1))
                    if not done:
                        break
            if done:
                os.set_blocking(self.asked, True)
                return text, dropped, ""
            with contextlib.suppress(ProcessLookupError):  # it may have closed its end and go on
                os.kill(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            return text, dropped, death(status)
        return b"", 0, "was not there any more"

    def drain(self):
        """Throws away what processes wrote that were ended after the call."""
        while True:
            can_read, _, _ = select.select([self.printed, self.ended], [], [], 0)
            if not any(os.read(fd, 1 << 16) for fd in can_read):
                return

    def close(self):
        for fd in (self.asked, self.printed, self.ended):
            os.close(fd)


def death(status):
    if os.WIFEXITED(status):
        return f"ended the session (exit code {os.WEXITSTATUS(status)})"
    number = os.WTERMSIG(status)
    if number == signal.SIGXCPU:
        return "ended the session (it used all of its CPU time)"
    names = {one.value: one.name for one in signal.Signals}
    return f"ended the session ({names.get(number, f'signal {number}')})"


def serve():
    me, names = os.getpid(), {"__name__": "__main__"}
    while True:
        size = read_all(8)
        if size is None:
            os._exit(0)
        code = read_all(int.from_bytes(size, "big"))
        reap()
        run(code.decode(), names)
        if os.getpid() != me:  # a fork of the code's own
            os._exit(0)
        reap()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os.write(3, b".")


def reap():
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def read_all(count):
    found = b""
    while len(found) < count:
        new = os.read(0, count - len(found))
        if not new:
            return None
        found += new
    return found


def run(code, names):
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
        frames = traceback.extract_tb(error.__traceback__)
        mine = [frame for frame in frames if frame.filename == "<python>"]
        place = "".join(f'  File "<python>", line {frame.lineno}, in {frame.name}\n' for frame in mine)
        said = "".join(traceback.format_exception_only(error))
        sys.stderr.write((f"Traceback (most recent call last):\n{place}" if place else "") + said)


def kill_the_rest(keep, told=set()):  # noqa: B006
    """Ends all processes of the namespace but this one and `keep`; says how many there were. Those that have ended but
    that the session has not asked for keep their numbers: nothing is left when the numbers stay the same, and they are
    not told of again."""
    count, before, same = 0, None, 0
    while True:
        probe = os.fork()  # numbers are given in order, so nothing is beyond this one
        if probe == 0:
            os._exit(0)
        os.waitpid(probe, 0)
        found = []
        for pid in range(2, probe):
            if pid != keep:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    found.append(pid)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid in (0, keep):
                    break
        new = [pid for pid in found if pid not in told]
        count, same, before = max(count, len(new)), same + 1 if found == before else 0, found
        if not found or same == 3:
            told.clear()
            told.update(found)
            return count
        time.sleep(0.001)


def main():
    limits = json.loads(sys.argv[1])
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    user = limits["user"]
    readable = [*SYSTEM, *dict.fromkeys(limits["readable"])]
    enter(limits["root"], readable, limits["disk"])
    os.environ.clear()
    os.environ.update(HOME=HOME, PATH="/usr/bin:/bin", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", TMPDIR=HOME)
    sys.path.append(limits["packages"])
    session = Session(limits, user)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked.get("reset"):
            text, dropped, what = b"", 0, "reset"
        else:
            text, dropped, what = session.run(
                asked["code"].encode(errors="replace"), asked["seconds"], limits["output"]
            )
        if what:
            with contextlib.suppress(ProcessLookupError):
                os.kill(session.pid, signal.SIGKILL)
            session.close()
        left = kill_the_rest(0 if what else session.pid)
        if asked.get("reset"):
            clear(HOME)
        if what:
            session = Session(limits, user)
        else:
            session.drain()
        answer = {
            "text": text.decode(errors="replace"),
            "dropped": dropped,
            "what": what,
            "left": left if not what else 0,
        }
        print(json.dumps(answer), flush=True)


def clear(directory):
    for entry in os.scandir(directory):
        if entry.is_dir(follow_symlinks=False):
            os.chmod(entry.path, 0o700)
            clear(entry.path)
            os.rmdir(entry.path)
        else:
            os.unlink(entry.path)


if __name__ == "__main__":
    main()
