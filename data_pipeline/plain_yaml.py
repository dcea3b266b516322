"""YAML as settings need it: names, numbers and text in a few levels; whatever else a file can hold is refused.

YAML text of a few lines can stand for a tree without end or with billions of entries (aliases of aliases, merge keys).
So the parsed nodes are counted, each alias as what it stands for, before a single value is made of them.
"""

import yaml

from data_pipeline.errors import shorten

MOST_LEVELS = 10
"""Levels that a tree may have: sections, keys and values need three."""

MOST_VALUES = 2000
"""Values that a tree may have, sections and keys included: ten times those of a complete configuration."""

LONGEST_NUMBER = 100
"""Characters of a whole number; Python itself refuses to print one of some thousand digits."""

_TAG = "tag:yaml.org,2002:"
_NAMES = (_TAG + "str", _TAG + "merge")


class NotPlainError(ValueError):
    """The text is no YAML, or not plain; line counts from 1, None if there is none to blame."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


def load_plain_yaml(text: str) -> object:
    """The one document in `text` as dictionaries (keyed by text), lists and scalars; None if it is empty.

    Raises NotPlainError.
    """
    try:
        loader = yaml.SafeLoader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return None
            _check_plain(root)
            return loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.YAMLError as fault:
        mark = getattr(fault, "problem_mark", None)
        problem = " ".join(str(getattr(fault, "problem", None) or fault).split())
        raise NotPlainError(f"expected YAML, found: {shorten(problem)}", mark.line + 1 if mark else None) from None
    except RecursionError:
        raise NotPlainError(f"expected at most {MOST_LEVELS} levels, found more") from None
    except NotPlainError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as fault:
        # What PyYAML's constructors meet in a value that only looks like a number or a date, or is tagged as one.
        raise NotPlainError(f"expected YAML, found a value without meaning ({shorten(str(fault))})") from None


def _check_plain(root: yaml.Node) -> None:
    """Raises NotPlainError unless the tree is small, finite, and keyed by text."""
    pending = [(root, 1)]
    seen = 0
    while pending:
        node, level = pending.pop()
        seen += 1
        line = node.start_mark.line + 1
        if level > MOST_LEVELS:
            raise NotPlainError(f"expected at most {MOST_LEVELS} levels, found more (an alias of what holds it?)", line)
        if seen > MOST_VALUES:
            raise NotPlainError(f"expected at most {MOST_VALUES} values, found more (aliases of aliases?)", line)
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                _check_key(key)
                pending.append((value, level + 1))
        elif isinstance(node, yaml.SequenceNode):
            pending.extend((item, level + 1) for item in node.value)
        elif node.tag == _TAG + "int" and len(node.value) > LONGEST_NUMBER:
            raise NotPlainError(f"expected a number of at most {LONGEST_NUMBER} digits, found {len(node.value)}", line)


def _check_key(key: yaml.Node) -> None:
    if not isinstance(key, yaml.ScalarNode):
        raise NotPlainError("expected a name as key, found a collection", key.start_mark.line + 1)
    if key.tag not in _NAMES:
        kind = key.tag.removeprefix(_TAG)
        message = f"expected a name as key, found {shorten(key.value)} ({shorten(kind)}): put it in quotes if it is one"
        raise NotPlainError(message, key.start_mark.line + 1)
