"""Free ports on 127.0.0.1, reserved until a server listens on them."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def free_ports(count: int, preferred: int) -> Iterator[int]:
    """The first of `count` consecutive free ports: `preferred`, or others. Raises OSError.

    They are reserved until the block ends: other callers get other ports. Start the server inside
    the block. All are below the kernel's range for outgoing connections, which could take them at
    any moment.
    """
    candidates = [preferred, *(random.randrange(10_000, 32_000 - count) for _ in range(200))]
    for first in candidates:
        with ExitStack() as reserved:
            if all(_reserve(port, reserved) for port in range(first, first + count)):
                yield first
                return
    raise OSError(f"no {count} consecutive free ports on 127.0.0.1")


def _reserve(port: int, until: ExitStack) -> bool:
    """Reserve a port by an abstract socket named after it, which ends with this process.

    False if the port is in use or reserved.
    """
    name, probe = until.enter_context(socket.socket(socket.AF_UNIX)), socket.socket()
    with probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            name.bind(f"\0trainwright-port-{port}")
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
