"""Bytes moved by a tree's sockets, over real connections on loopback."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jackline.machine import net
from jackline.machine.net import far_address, parse_ss, tree_sockets
from tests.deadline import HANGS_S
from tests.machine.conftest import Start, wait_until


def tree_tcp_bytes(pids: list[int]) -> int | None:
    sockets = tree_sockets(pids)
    return None if sockets is None else sum(sockets.values())


SS_OUTPUT = """\
ESTAB 0      0       127.0.0.1:33042 127.0.0.1:41111 ino:101 sk:2001 cgroup:unreachable:1 <->
\t cubic wscale:7,7 rto:204 rtt:0.03/0.01 mss:32768 bytes_sent:500 bytes_acked:501 bytes_received:1000 segs_out:3
ESTAB 0      0       127.0.0.1:33044 127.0.0.1:41111 ino:102 sk:2002 cgroup:unreachable:1 <->
\t cubic wscale:7,7 rto:204 bytes_acked:70000 bytes_received:80000
"""


def test_a_process_without_sockets_moved_nothing(start: Start) -> None:
    child = start("print('ready'); import time; time.sleep(600)")
    assert tree_tcp_bytes([child.pid]) == 0


def test_received_and_acknowledged_bytes_of_a_tree_are_counted(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = (
            f"import socket; s = socket.create_connection(('127.0.0.1', {port}))\n"
            "print('ready')\n"
            "while data := s.recv(65536): s.sendall(data[:1000])"
        )
        child = start(code)
        far, _ = server.accept()
        with far:
            assert tree_tcp_bytes([child.pid]) in (0, 1)  # the handshake counts as one acknowledged byte
            far.sendall(bytes(50_000))
            moved = wait_until(lambda: (n := tree_tcp_bytes([child.pid])) and n >= 51_000 and n, "51,000 bytes")
            assert moved < 200_000
            assert tree_tcp_bytes([]) == 0
            # A far end in the same tree is one more socket with the same bytes.
            assert (tree_tcp_bytes([child.pid, os.getpid()]) or 0) > moved


def test_a_socket_shared_by_forked_workers_counts_once(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = (
            f"import os, socket, time; s = socket.create_connection(('127.0.0.1', {port})); s.recv(1)\n"
            "child = os.fork()\n"
            "if child == 0: time.sleep(600)\n"
            "print('ready', flush=True)\n"
            "s.recv(1); os.kill(child, 9); time.sleep(600)"
        )
        far: list[socket.socket] = []

        def greet() -> None:
            connection, _ = server.accept()
            connection.sendall(b"x")
            far.append(connection)

        thread = threading.Thread(target=greet)
        thread.start()
        parent = start(code)
        thread.join()
        with far[0]:
            listed = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text()
            children = [int(word) for word in listed.split()]
            assert len(children) == 1
            assert tree_tcp_bytes([parent.pid, *children]) == tree_tcp_bytes([parent.pid])
            far[0].sendall(b"x")
            wait_until(lambda: not os.path.exists(f"/proc/{children[0]}/fd/0"), "the worker to be gone")


def test_without_netlink_ss_gives_the_same_number(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    if not shutil.which("ss"):
        pytest.skip("ss is not installed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = (
            f"import socket; s = socket.create_connection(('127.0.0.1', {port})); s.sendall(bytes(12345))\n"
            "print('ready'); s.recv(1)"
        )
        child = start(code)
        far, _ = server.accept()
        with far:
            wait_until(lambda: (tree_tcp_bytes([child.pid]) or 0) >= 12345, "the bytes to be acknowledged")
            by_netlink = tree_tcp_bytes([child.pid])

            def refuse() -> None:
                raise OSError("no netlink here")

            monkeypatch.setattr(net, "_dump_tcp_bytes", refuse)
            assert tree_tcp_bytes([child.pid]) == by_netlink


def test_without_netlink_and_ss_the_number_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError("no netlink here")

    monkeypatch.setattr(net, "_dump_tcp_bytes", refuse)
    monkeypatch.setenv("PATH", "/nonexistent")
    with socket.socket():
        assert tree_tcp_bytes([os.getpid()]) is None


def test_a_process_without_sockets_has_moved_nothing_and_the_kernel_is_not_asked(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise AssertionError("asked for all sockets of the machine")

    monkeypatch.setattr(net, "_dump_tcp_bytes", refuse)
    assert tree_sockets([start("print('ready'); import time; time.sleep(600)").pid]) == {}


def test_the_text_of_ss_is_summed_for_our_sockets_only() -> None:
    assert parse_ss(SS_OUTPUT, {101}) == {101: 1501}
    assert parse_ss(SS_OUTPUT, {101, 102}) == {101: 1501, 102: 150000}
    assert parse_ss(SS_OUTPUT, set()) == {}
    assert parse_ss("garbage ino:x bytes_acked:1", {101}) == {}


def test_far_addresses_are_read_from_the_kernels_hexadecimal_tables() -> None:
    table = (
        b"  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        b"   0: 0100007F:8124 0A00000A:01BB 01 00000000:00000000 00:00000000 00000000  1000 0 4242 1 0 20 4 30\n"
        b"   1: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000 0 4243 1 0 100 0 0 10 0\n"
    )
    if sys.byteorder != "little":
        pytest.skip("the table above is of a little-endian machine")
    assert far_address(table, b"4242") == "10.0.0.10:443"
    assert far_address(table, b"4243") == "listening on 0.0.0.0:8080"
    assert far_address(table, b"9") is None


def test_ss_really_prints_what_we_read() -> None:
    if not shutil.which("ss"):
        pytest.skip("ss is not installed")
    done = subprocess.run(["ss", "-tineH"], capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr


def diag_message(address: str, *, timer: int, repeats: int, waiting: int) -> bytes:
    """A reply of NETLINK_SOCK_DIAG about one connection, as the kernel writes it."""
    far = socket.inet_aton(address)
    head = struct.pack("=BBBBHH16s16sI8xIIIII", 2, 1, timer, repeats, 1, 2, b"", far, 0, 0, 0, waiting, 0, 101)
    info = bytes(120) + struct.pack("=QQ", 7, 1000)
    return head + struct.pack("=HH", 4 + len(info), 2) + info


@pytest.mark.parametrize(
    ("timer", "repeats", "waiting", "has_route", "silent"),
    [
        (1, 5, 9, True, "10.0.0.2"),
        (1, 2, 9, True, ""),
        (4, 0, 9, False, "10.0.0.2"),
        (4, 0, 9, True, ""),
        (4, 0, 0, False, ""),
        (0, 0, 0, True, ""),
    ],
    ids=["far cut", "lost one packet", "own device down", "far end reads slowly", "nothing to send", "idle"],
)
def test_an_address_that_acknowledges_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, timer: int, repeats: int, waiting: int, has_route: bool, silent: str
) -> None:
    monkeypatch.setattr(net, "_has_route", lambda family, address: has_route)
    message = diag_message("10.0.0.2", timer=timer, repeats=repeats, waiting=waiting)
    assert list(net._socket_bytes(message)) == [(101, 1007, silent)]


def test_an_address_of_this_machine_has_a_route() -> None:
    assert net._has_route(socket.AF_INET, "127.0.0.1")
