"""Environments that are not there are named."""

import pytest

from metastable.core.errors import MissingDependencyError
from metastable.policies import gym_environments


def test_an_environment_of_a_package_that_is_not_there_is_named():
    pytest.importorskip("gymnasium", reason="environments are those of Gymnasium")
    with pytest.raises(MissingDependencyError, match=r"env: must be .* got 'nosuchmod:Env-v0': .*nosuchmod"):
        gym_environments("nosuchmod:Env-v0", [0])
