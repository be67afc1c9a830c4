"""The ring of input slots: the only host memory that queued work reads, and the only way to write it.

A slot is written between `acquire` and `seal`. `acquire` waits until the device has read what the slot held before;
`seal` takes the writable views back. There is no other way to get a writable view.
"""

from __future__ import annotations

from pyllm.device import Device, Event
from pyllm.device.memory_check import assert_done
from pyllm.input_block import InputLayout, InputViews


class InputSlot:
    """One pinned buffer with the inputs of one ubatch.

    Attributes:
        bytes: [layout.num_bytes] uint8, what the device copies; read-only for the host.
        number: of the slot in its ring, from 1 on.
        tables: for whoever fills it: what of its page tables is there from the last time.
    """

    def __init__(self, device: Device, layout: InputLayout, number: int) -> None:
        self._pinned = device.pinned(layout.num_bytes)
        self._pinned.writable()[:] = 0
        self.number = number
        self.tables: list[tuple[int, int, int]] = []
        self._device = device
        self._layout = layout
        self._views: InputViews | None = None
        self._read_event: Event | None = None
        self._in_use = False
        self.bytes = self._pinned.array

    def open(self) -> InputViews:
        if self._device.checks and self._in_use:
            assert self._read_event is not None, "an input slot is written whose submission broke off"
            assert_done(self._read_event, "an input slot is written")
        self._views = self._layout.views(self._pinned.writable())
        self._in_use = True
        return self._views

    def seal(self) -> None:
        """Make the views of the last `open` read-only."""
        if self._views is not None:
            for view in vars(self._views).values():
                view.flags.writeable = False

    def mapped(self) -> InputViews:
        """Views for launches that read the slot in place."""
        return self._layout.views(self._device.mapped(self._pinned))

    def forge(self) -> InputViews:
        """Test hook: writable views, whatever the device does with the slot. On a GPU, hold the stream with a gate."""
        return self._layout.views(self._pinned.memory)

    def read_behind(self, event: Event) -> None:
        """The device has read the slot once `event` completes."""
        self._read_event = event
        self._pinned.used_until(event)

    def wait_until_read(self) -> None:
        if not self._in_use:
            return
        if self._read_event is None:
            self._device.synchronize()  # a submission broke off before its event was recorded: nothing less is safe
        else:
            self._read_event.synchronize()
        self._read_event, self._in_use = None, False


class InputRing:
    """Slots in turn.

    Args:
        depth: slots; how many ubatches the host can prepare before the device has read the first.
        wait: False is a test hook: hand a slot out while queued work may still read it. It reproduces the fault that
            this project exists for.
    """

    def __init__(self, device: Device, layout: InputLayout, depth: int, wait: bool = True) -> None:
        self._slots = [InputSlot(device, layout, 1 + index) for index in range(depth)]
        self._next = 0
        self._wait = wait

    @property
    def slots(self) -> tuple[InputSlot, ...]:
        return tuple(self._slots)

    def acquire(self) -> tuple[InputSlot, InputViews]:
        """The next slot and writable views of it, once the device has read its former content."""
        slot = self._slots[self._next]
        if self._wait:
            slot.wait_until_read()
        self._next = (self._next + 1) % len(self._slots)
        return slot, slot.open()
