"""A device of each life."""

import pytest

from tests.ops.lives import LIVES


@pytest.fixture(params=LIVES)
def device(request: pytest.FixtureRequest):
    device = LIVES[request.param]()
    yield device
    device.close()
