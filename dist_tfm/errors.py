"""The user-facing errors (defined in `data_pipeline.errors`, the lowest package, and re-exported here)."""

from data_pipeline.errors import (
    ConfigError,
    DistTfmError,
    DivergedError,
    InputError,
    RunError,
    describe_os_error,
)

__all__ = ["ConfigError", "DistTfmError", "DivergedError", "InputError", "RunError", "describe_os_error"]
