"""NVML's clock, temperature and energy of the GPU that is used, by ctypes: no package is needed."""

from __future__ import annotations

import ctypes

import cupy


class Meter:
    """Readings of the current GPU.

    Raises
    ------
    OSError
        If there is no NVML, or it says no.
    """

    def __init__(self) -> None:
        self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self.device = ctypes.c_void_p()
        self._check(self.nvml.nvmlInit_v2())
        bus = cupy.cuda.runtime.deviceGetPCIBusId(cupy.cuda.runtime.getDevice())
        address = bus if isinstance(bus, bytes) else bus.encode()
        find = self.nvml.nvmlDeviceGetHandleByPciBusId_v2
        self._check(find(ctypes.c_char_p(address), ctypes.byref(self.device)))
        self.joules()

    def _check(self, error: int) -> None:
        if error:
            raise OSError(f"NVML error {error}")

    def _read(self, name: str, kind: type, *given: int) -> int:
        found = kind()
        self._check(getattr(self.nvml, name)(self.device, *given, ctypes.byref(found)))
        return found.value

    def megahertz(self) -> int:
        """The SM clock now."""
        return self._read("nvmlDeviceGetClockInfo", ctypes.c_uint, 1)

    def celsius(self) -> int:
        """The chip's temperature."""
        return self._read("nvmlDeviceGetTemperature", ctypes.c_uint, 0)

    def joules(self) -> float:
        """Energy of the board since the driver was loaded; renewed some ten times a second."""
        return self._read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong) / 1e3

    def limit(self) -> float:
        """Watts that the board may draw."""
        return self._read("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint) / 1e3

    def capped(self) -> bool:
        """Whether the clock is held back by the power limit now."""
        reasons = self._read("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong)
        return bool(reasons & 0x4)  # nvmlClocksThrottleReasonSwPowerCap
