"""As for all tests of models: a GPU's context is opened before the first of them."""

from tests.models.conftest import open_gpu  # noqa: F401
