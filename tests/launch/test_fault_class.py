"""Kinds of faults, and how long to wait after them."""

from __future__ import annotations

import signal

import pytest

from hpcrun.launch.fault_class import classify_crash, classify_hang
from hpcrun.launch.recovery import backoff_s
from hpcrun.launch.watch.stacks import RankStack, find_outlier, group_stacks


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("CUDA error: uncorrectable ECC error encountered", "infrastructure"),
        (
            "NCCL error in: ProcessGroupNCCL.cpp:3690, ncclRemoteError: remote process exited",
            "infrastructure",
        ),
        ("[Errno 5] Input/output error: '/lustre/tokens.bin'", "infrastructure"),
        ("[Errno 28] No space left on device", "infrastructure"),
        ("DataLoader worker (pid 12) is killed by signal: Segmentation fault.", "data"),
        ("no such layer", "unknown"),
    ],
)
def test_by_what_a_rank_has_written_down(message: str, kind: str) -> None:
    assert classify_crash({"message": message, "traceback": ""}) == kind


@pytest.mark.parametrize(
    "message",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79 GiB",
        "torch.cuda.OutOfMemoryError: HIP out of memory. Tried to allocate 20.00 MiB",
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx(...)`",
        "NCCL WARN Cuda failure 2 'out of memory'",
        "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error: Cuda failure 'out of memory'",
        "RuntimeError: CUDA error: device-side assert triggered",
        "IndexKernel.cu:92: Assertion `index >= -sizes[i]` failed.\nCUDA error: device-side assert triggered",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "RuntimeError: CUDA error: invalid device ordinal",
        "RuntimeError: CUDA error: invalid argument",
        "RuntimeError: CUDA error: invalid configuration argument",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "RuntimeError: CUDA error: misaligned address",
        "RuntimeError: CUDA error: too many resources requested for launch",
        "RuntimeError: CUDA error: operation not permitted when stream is capturing",
        "RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain.",
        "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 7000",
        "NCCL error in: NCCLUtils.hpp:268, invalid usage, NCCL version 2.21.5",
        "NCCL error in: x.cpp:1, invalid argument\nncclInvalidArgument: Invalid value for an argument.",
        "NCCL WARN AllReduce : invalid type 12",
        "RuntimeError: Unconvertible NCCL type Short",
        "RuntimeError: expected scalar type Float but found BFloat16; NCCL error: dtypes do not match",
        "ValueError: NCCL_IB_HCA='mlx5_0' is not in the list",
        "OSError: [Errno 12] Cannot allocate memory",
    ],
)  # fmt: skip
def test_what_the_program_or_its_settings_bring_about_is_no_fault_of_the_machine(message: str) -> None:
    kind, _, text = message.partition(": ")
    for record in (
        {"message": message, "traceback": ""},
        {"message": text or kind, "traceback": f"Traceback (most recent call last):\n{message}"},
    ):
        assert classify_crash(record) in ("deterministic", "unknown")


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error: uncorrectable NVLink error detected during the execution",
        "CUDA error: unknown error",
        "CUDA error: all CUDA-capable devices are busy or unavailable",
        "RuntimeError: No CUDA-capable device is detected",
        "CUDA error: system not yet initialized",
        "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.  Reboot the system",
        "NVRM: GPU at 0000:18:00.0 has fallen off the bus.",
        "NCCL error in: x.cpp:1, unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "NCCL WARN NET/IB : mlx5_3:1 Got completion from peer 10.0.0.2 with status=12 opcode=0",
        "mlx5_0: port 1 is down",
        "[Errno 116] Stale file handle",
    ],
)
def test_what_the_machine_brings_about(message: str) -> None:
    assert classify_crash({"message": message, "traceback": ""}) == "infrastructure"


def test_by_the_place_of_an_error() -> None:
    place = '  File "/opt/x/hpcrun/runtime/data_loader.py", line 88, in __next__\n'
    assert classify_crash({"message": "index 9 is out of bounds", "traceback": place}) == "data"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (signal.SIGKILL, "infrastructure"),
        (signal.SIGBUS | 0x80, "infrastructure"),
        (signal.SIGSEGV, "unknown"),
        (3 << 8, "unknown"),
        (None, "unknown"),
    ],
)
def test_by_how_a_process_ended(status: int | None, kind: str) -> None:
    assert classify_crash(None, status) == kind


def test_of_a_hang() -> None:
    many = [RankStack(rank, "a", "S", "", (("x.py", "reduce"),)) for rank in range(3)]
    for state, kind in (("T", "infrastructure"), ("D", "infrastructure"), ("", "infrastructure")):
        assert classify_hang(find_outlier(group_stacks([*many, RankStack(3, "b", state)]))) == kind
    reading = RankStack(3, "b", "R", "", (("x.py", "read"),))
    assert classify_hang(find_outlier(group_stacks([*many, reading]))) == "unknown"
    assert classify_hang(None) == "unknown"


def test_the_pause_grows_with_attempts_that_save_nothing() -> None:
    assert [backoff_s(count) for count in range(7)] == [0, 0, 2, 8, 32, 60, 60]
