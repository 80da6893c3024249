"""Environment variables that set options."""

from shared.config import unknown_variables, variable_of


def test_an_options_variable_has_the_prefix_and_underscores() -> None:
    assert variable_of("--max-step-tokens") == "PATERNOSTER_MAX_STEP_TOKENS"


def test_only_misspelt_variables_of_ours_are_unknown() -> None:
    environ = {"PATERNOSTER_PORT": "1", "PATERNOSTER_PROT": "1", "PATERNOSTER_A": "", "PATH": "/bin"}
    assert unknown_variables(environ, {"PATERNOSTER_PORT"}) == ["PATERNOSTER_A", "PATERNOSTER_PROT"]
