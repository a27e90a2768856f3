"""What lies on disk: a checkpoint's manifest and its parts, weights of other programs, and every act that changes a file.

Nothing here knows of ranks or pipelines. `penstock.front` says what is saved, and who writes which part of it.
"""

from __future__ import annotations
