"""An accelerator that is none, so that tiers with different ones can be tested on any machine.

`accelerator.cpp` gives PyTorch a device type `accel` that lives in the host's memory and refuses
what a GPU refuses, above all operands on different devices. What is only true of a GPU, such as
streams or a precision of its own, does not show.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator

_SOURCE = Path(__file__).with_name("accelerator.cpp")
_COMPILE_SECONDS = 240.0


def missing() -> str | None:
    """Returns why the accelerator cannot be built here, or `None`."""
    if sys.platform != "linux":
        return f"the emulated accelerator is built on Linux only, this is {sys.platform}"
    if shutil.which("g++") is None:
        return "there is no C++ compiler (g++) to build the emulated accelerator with"
    return None


def build(library: Path) -> None:
    """Compiles the accelerator; without optimisation, which would take longer than the tests."""
    torch_folder = Path(torch.__file__).parent
    command = [
        *("g++", "-std=c++20", "-O0", "-fPIC", "-shared", str(_SOURCE), "-o", str(library)),
        *(f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]


def load(library: str | Path) -> None:
    """Adds the device type `accel` to this process, for good."""
    torch.ops.load_library(library)
    calls = torch.ops.emulated
    device_module: Any = types.ModuleType("torch.accel")
    device_module.is_available = lambda: True
    device_module.is_initialized = lambda: True
    device_module._is_in_bad_fork = lambda: False
    device_module.device_count = lambda: 1
    device_module.current_device = lambda: 0
    device_module.device = lambda _: contextlib.nullcontext()
    device_module.manual_seed = device_module.manual_seed_all = calls.seed
    device_module.get_rng_state = lambda device=0: calls.get_state()
    device_module.set_rng_state = lambda state, device=0: calls.set_state(state)
    device_module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    device_module.num_synchronizations = calls.num_synchronizations
    torch.utils.rename_privateuse1_backend("accel")
    torch._register_device_module("accel", device_module)
    torch.utils.generate_methods_for_privateuse1_backend()
    calls.set_up()


class Emulated(Accelerator):
    """Lightning's idea of it."""

    def setup_device(self, device: torch.device) -> None:
        assert device.type == "accel", device

    def teardown(self) -> None:
        """Has nothing to free."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("accel", 0)] * int(devices)

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "accel"
