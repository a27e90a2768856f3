"""Where people already train: each file here brings penstock into one other package, which is imported with it.

    from penstock.integrations.transformers import PipelineTrainer, pipeline     # pip install "penstock[hf]"
    from penstock.integrations.lightning import PipelineStrategy                 # pip install "penstock[lightning]"

Nothing else in penstock imports these, so `import penstock` needs none of the packages.
"""

from __future__ import annotations
