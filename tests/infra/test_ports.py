"""Free ports: each caller gets its own ports until a server listens on them."""

from __future__ import annotations

import socket
import subprocess
import sys

from trainwright.infra.ports import free_ports


def test_free_ports_keep_the_preferred_ones_only_while_all_are_free() -> None:
    with free_ports(4, 20_000) as first:
        pass
    with free_ports(4, first) as again:
        assert again == first
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 3))
        taken.listen()
        with free_ports(4, first) as other:
            assert first + 3 not in range(other, other + 4)


def test_concurrent_callers_get_different_ports_and_those_of_a_killed_process_are_free() -> None:
    code = (
        "import sys, time\nfrom trainwright.infra.ports import free_ports\n"
        "with free_ports(4, int(sys.argv[1])) as first:\n"
        "    print(first, flush=True); time.sleep(600)"
    )
    with free_ports(4, 20_000) as first:
        pass
    asking = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(first)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    try:
        given = [int(one.stdout.readline()) for one in asking if one.stdout is not None]
        assert len({port for found in given for port in range(found, found + 4)}) == 12
        with free_ports(4, first) as mine:
            assert mine not in given
    finally:
        for one in asking:
            one.kill()
            one.communicate()
    with free_ports(4, first) as mine:
        assert mine == first
