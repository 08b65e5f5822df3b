"""A command that waits for its turn: python -m eelib.common.turns LOCK WORDS COMMAND...

The turn is a lease on the file LOCK, which ends with the command, however that ends; WORDS are said where somebody else
has it. This needs nothing but Python, for it stands before the installation of all else.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from eelib.common.leases import Lease, take


def take_turn(path: Path, words: str, command: list[str], first: Callable[[], object] = lambda: None) -> NoReturn:
    """Become the command once it is its turn, after `first`. `words` are said where somebody else has the lease on
    `path`, whose folder is made. Where no lease can be had the command runs without, and says what can't be written.
    """
    lease = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lease = take(path, lambda: print(words, flush=True))
        first()
    except OSError as error:
        print(f"No turn could be taken: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        sys.exit(130)
    become(command, lease)


def become(command: list[str], lease: Lease | None) -> NoReturn:
    """Run a command that holds the lease until its end."""
    if lease is None or lease.beating is None:
        if lease:  # a lock of the file system's, which the command keeps
            os.set_inheritable(lease.descriptor, True)
        os.execvp(command[0], command)
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C reaches the command itself
    done = subprocess.run(command, close_fds=False)  # while this process keeps the lease alive
    lease.close()
    sys.exit(done.returncode if done.returncode >= 0 else 128 - done.returncode)


if __name__ == "__main__":
    take_turn(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
