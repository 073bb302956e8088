"""As for all tests of models: a card's context is opened before the first of them."""

from tests.models.conftest import open_card  # noqa: F401
