"""Streams on a GPU take little of its memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

MEASURE = """
import json, torch
from te_offload.offload.streams import new_stream
x = torch.arange(1 << 20, device="cuda")
y = x + 1
def free():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]
before = free()
ours = [new_stream(0) for _ in range(3)]
for stream in ours:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y.add_(x)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.cuda.current_stream() != stream
middle = free()
theirs = torch.cuda.Stream()
last = free()
right = bool((y == 4 * x + 1).all())
print(json.dumps([right, before - middle, middle - last, len({one.cuda_stream for one in ours})]))
"""
"""Bytes that three of ours take, and torch's first one."""

REUSE = """
import gc, torch
from te_offload.offload.streams import new_stream
kept = new_stream(0)
handles = set()
for _ in range(5):
    gone = new_stream(0)
    handles.add(gone.cuda_stream)
    del gone
    others = [torch.cuda.Stream() for _ in range(9)]  # whose memory may be where the stream was
    gc.collect()
print(len(handles), kept.cuda_stream in handles)
"""


def test_a_stream_that_is_gone_is_given_out_again_and_the_process_ends_well() -> None:
    done = subprocess.run([sys.executable, "-c", REUSE], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["1", "False"]


def test_three_streams_of_ours_take_less_memory_than_the_first_of_torchs() -> None:
    """That makes all of its streams at once."""
    done = subprocess.run([sys.executable, "-c", MEASURE], stdout=subprocess.PIPE, text=True, check=True)
    right, ours, theirs, handles = json.loads(done.stdout.splitlines()[-1])
    print(f"three streams of ours: {ours} bytes, the first of torch's: {theirs}")
    assert right
    assert handles == 3
    assert ours < theirs / 4
