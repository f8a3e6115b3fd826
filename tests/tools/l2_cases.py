"""Shared code of the tests of the L2 model."""

from flashsim import Device, l2


def small_device(l2_bytes, *, sms=3, partitions=1):
    return Device(
        *("toy", 1 << 20, 1 << 20), sm_count=sms, l2_bytes=l2_bytes, l2_partitions=partitions
    )


def streams(traffic, model):
    tiles, parts = l2.model._streams(traffic, model)
    return tiles, list(parts)
