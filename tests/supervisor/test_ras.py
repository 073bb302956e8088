"""NCCL's RAS service on a made-up server that speaks its protocol, with the report of NCCL's manual."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from jackline.supervisor.stacks import flight
from jackline.supervisor.stacks.flight import ask_ras, explain_ras, ras_address

REPORT = """\
NCCL version 2.27.5 compiled with CUDA 12.9

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    0         1         4         8        32        32   RUNNING  MISMATCH

Warnings
========

#0-0 (cf264af53edbe986) MISMATCH
  Communicator ranks have different collective operation counts
  31 ranks have launched up to operation 6650
  1 ranks have launched up to operation 6649
    Rank 7 -- GPU 7 managed by process 483072 on node 172.16.64.210
"""
TOLD = (
    "MISMATCH: Communicator ranks have different collective operation counts, 31 ranks have launched up to operation "
    "6650, 1 ranks have launched up to operation 6649, Rank 7 -- GPU 7 managed by process 483072 on node "
    "172.16.64.210"
)


def serve(server: socket.socket, asked: list[bytes]) -> None:
    channel, _ = server.accept()
    with channel, channel.makefile("rb") as lines:
        for answer in (b"SERVER PROTOCOL 2\n", b"OK\n", REPORT.encode()):
            asked.append(lines.readline())
            channel.sendall(answer)


@pytest.fixture
def port() -> Iterator[tuple[int, list[bytes]]]:
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server, asked), daemon=True)
        thread.start()
        yield server.getsockname()[1], asked


def test_a_process_of_the_run_that_has_the_service_is_asked(
    port: tuple[int, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    number, asked = port
    monkeypatch.setattr(flight, "read_environ", lambda pid: {"NCCL_RAS_ADDR": f"127.0.0.1:{number}"})
    assert ask_ras([os.getpid()]) == TOLD
    assert asked == [b"CLIENT PROTOCOL 2\n", b"TIMEOUT 2\n", b"STATUS\n"]


def test_a_service_of_another_job_is_not_asked(
    port: tuple[int, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "read_environ", lambda pid: {"NCCL_RAS_ADDR": f"127.0.0.1:{port[0]}"})
    assert ask_ras([1]) == ""
    assert port[1] == []
    assert ask_ras([]) == ""


def test_a_report_without_warnings_or_of_another_form_says_nothing() -> None:
    assert explain_ras(REPORT.partition("Warnings")[0]) == ""
    assert explain_ras("\x1b[31mgarbage\n====\n#0-0 (ab) X\n") == ""
    assert ras_address({"NCCL_RAS_ADDR": "nonsense"}) == ("localhost", 28028)
