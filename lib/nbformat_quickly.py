"""``nbformat``, imported in 0.3 s instead of 2.3 s.

Where JupyterLab is installed, the import builds a grammar of international URIs, for a format of
JSON Schema that no notebook's schema has. It goes on without where that module is not to be had.
"""

from __future__ import annotations

import sys

_GRAMMAR = "rfc3987_syntax"

_unknown = _GRAMMAR not in sys.modules
if _unknown:
    sys.modules[_GRAMMAR] = None  # type: ignore[assignment]  # an import of it fails
try:
    import nbformat as nbformat
finally:
    if _unknown:
        del sys.modules[_GRAMMAR]
