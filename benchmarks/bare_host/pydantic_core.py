"""In pydantic_core's place, as pydantic.py beside it."""


class PydanticCustomError(ValueError):
    """Never raised: nothing is checked."""
