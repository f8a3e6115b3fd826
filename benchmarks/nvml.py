"""Read NVML's clock, temperature and energy of the current GPU through ctypes."""

from __future__ import annotations

import ctypes

import cupy


class Meter:
    """Readings of the current GPU.

    Raises
    ------
    OSError
        If NVML is missing or returns an error.
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
        """Return the current SM clock in MHz."""
        return self._read("nvmlDeviceGetClockInfo", ctypes.c_uint, 1)

    def celsius(self) -> int:
        """Return the chip's temperature."""
        return self._read("nvmlDeviceGetTemperature", ctypes.c_uint, 0)

    def joules(self) -> float:
        """Return the board's energy since the driver was loaded, updated ten times per second."""
        return self._read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong) / 1e3

    def limit(self) -> float:
        """Return the board's power limit in watts."""
        return self._read("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint) / 1e3

    def capped(self) -> bool:
        """Whether the power limit currently reduces the clock."""
        reasons = self._read("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong)
        return bool(reasons & 0x4)  # nvmlClocksThrottleReasonSwPowerCap
