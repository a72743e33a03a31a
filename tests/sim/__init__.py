"""The simulator."""

import tests.untimed  # noqa: F401 - before the stories, which take its settings
