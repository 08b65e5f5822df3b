"""Leases on a piece of work that one of many processes does at a time, here or on machines that share its folder.

Where the file system has locks, a lease is a locked file, which the kernel (or the file server) lets go when its holder
ends. Where it has none, a lease is a file beside it that its holder touches every BEAT seconds; one that was not
touched for DEAD seconds, by the file system's own clock, is taken over. A holder that was stopped for so long and goes
on works beside its follower: so what is guarded must be work that gives the same bytes whoever does it, written at one
stroke.
"""

import errno
import fcntl
import os
import stat
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # what file systems without locks answer
BEAT, DEAD = 10.0, 60.0  # seconds
POLL = 0.5  # seconds between two looks at a lease that is somebody else's


class Lease:
    """A lease that is held, until it is closed or the process ends."""

    def __init__(self, path: Path, descriptor: int, beating: "Beating | None"):
        self.path, self.descriptor, self.beating = path, descriptor, beating

    def close(self, remove: bool = False) -> None:
        """Let it go; `remove` its file, too."""
        if remove:
            self.path.unlink(missing_ok=True)  # while it is held: who waits for it notices that it guards nothing
        if self.beating:
            self.beating.stop()
        os.close(self.descriptor)


def take(path: Path, wait: Callable[[], object] | None = None) -> Lease | None:
    """The lease on `path`, whose file is made. None where somebody else has it; with `wait`, which is called once
    before, it is waited for. OSError: the file can't be made, or is no regular file; FileNotFoundError: no folder.
    """
    while True:
        descriptor = open_lock(path)
        try:
            beating = hold(path, descriptor, wait)
        except BaseException:
            os.close(descriptor)
            raise
        if beating is False:
            os.close(descriptor)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return Lease(path, descriptor, beating)
        if beating:
            beating.stop()
        os.close(descriptor)  # who held it has removed it: it guards nothing
        wait = wait and (lambda: None)  # told once


def open_lock(path: Path) -> int:
    """A file that is there to be locked alone: nothing is written to it, and no link is followed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path.name} is no regular file")
    return descriptor


def hold(path: Path, descriptor: int, wait: Callable[[], object] | None) -> "Beating | Literal[False] | None":
    """Lock an open file: None where the file system does it, a Beating where it can't; False: another has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        if wait is None:
            return False
        wait()
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    mark = path.with_name(f"{path.name}.held")
    beating = Beating.take(mark)
    if beating is None and wait is not None:
        wait()
        while beating is None:
            time.sleep(POLL)
            beating = Beating.take(mark)
    return beating or False


class Beating:
    """A lease without locks: a file that holds its maker's token and is touched while that lives."""

    def __init__(self, mark: Path, token: bytes):
        self.mark, self.token, self.end = mark, token, threading.Event()
        threading.Thread(target=self.beat, daemon=True).start()

    @classmethod
    def take(cls, mark: Path) -> "Beating | None":
        """The lease, where nobody has it or its holder has not been heard of for DEAD seconds."""
        token = uuid.uuid4().hex.encode()
        for _ in range(2):
            try:
                descriptor = os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                os.write(descriptor, token)
                os.close(descriptor)
                return cls(mark, token)
            except FileExistsError:
                if not bury(mark):
                    return None
        return None

    def beat(self) -> None:
        """Touch the file until the end; one that has become another's is left alone."""
        while not self.end.wait(BEAT):
            with suppress(OSError):
                if self.mark.read_bytes() == self.token:
                    os.utime(self.mark)

    def stop(self) -> None:
        """Let the lease go, unless it has been taken over."""
        self.end.set()
        with suppress(OSError):
            if self.mark.read_bytes() == self.token:
                self.mark.unlink()


def bury(mark: Path) -> bool:
    """Take away a mark that was not touched for DEAD seconds; whether there is none now. Of several, one does."""
    grave = mark.with_name(f"{mark.name}.{uuid.uuid4().hex}")
    try:
        token, touched = mark.read_bytes(), mark.stat().st_mtime
        grave.touch()  # its time is the file system's, as the mark's is
        if grave.stat().st_mtime - touched < DEAD:
            return False
        os.rename(mark, grave)
        if grave.read_bytes() != token:  # another was quicker, and this is its new one
            os.link(grave, mark)
            return False
        return True
    except FileNotFoundError:
        return True
    except FileExistsError:
        return False
    finally:
        grave.unlink(missing_ok=True)
