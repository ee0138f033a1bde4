"""Memory that was freed stays while a model trains, and goes back after it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc alone is told")
ASK = """
import ctypes, resource, torch
from metastable.core import heap

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # pages of 4 KiB: of 2 MiB a late place would weigh as a third of all

class Told(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    _fields_ = [(name, ctypes.c_size_t) for name in names]

def in_use():
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Told
    told = libc.mallinfo2()
    return told.hblkhd + told.uordblks

before = in_use()
some = torch.ones(1 << 22)
glibc = int(in_use() - before >= 1 << 23)  # half of it at least: torch may have a malloc of its own

torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(8, 128), *(torch.nn.SiLU() for _ in range(3)))

def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        net(torch.randn(16384, 8, requires_grad=True)).sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

faults(5)
plain = faults(50)
with heap.kept():
    with heap.kept():
        faults(20)
    inside = faults(50)  # of so many updates the few that still find a larger place do not matter
    held = [torch.ones(1 << 21) for _ in range(40)]
    del held
    much = resident()
print(glibc, plain, inside, much - resident())
"""


def asked(**environment: str) -> list[int]:
    told = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", ASK]
    done = subprocess.run(command, capture_output=True, text=True, env=told | environment)
    if "mallinfo2" in done.stderr:
        pytest.skip("this glibc does not tell what it gave")
    assert not done.returncode, done.stderr
    glibc, *found = (int(word) for word in done.stdout.split())
    if not glibc:
        pytest.skip("torch has a malloc of its own here, as its builds for ARM do")
    return found


def test_memory_is_kept_inside_and_goes_back_after_it():
    plain, inside, given_back = asked()
    assert inside < plain / 3
    assert given_back > 100 * 2**20


def test_what_a_user_says_of_it_holds():
    plain, inside, _ = asked(MALLOC_TRIM_THRESHOLD_="1000000", MALLOC_MMAP_THRESHOLD_="100000")
    assert inside > plain / 2
