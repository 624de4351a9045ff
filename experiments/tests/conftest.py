"""The fixtures of tests/, which pyproject.toml puts on the path."""

from conftest import *  # noqa: F403
