#!/bin/sh
# On every host. HOST is the one that the others call; without it there is one host.
exec torchrun --nnodes "${NODES:-1}" --nproc-per-node "${RANKS:-2}" --max-restarts 3 \
  --rdzv-backend c10d --rdzv-endpoint "${HOST:-localhost}:${PORT:-29500}" --rdzv-id "${RUN:-penstock}" \
  -m penstock train --resume -o "${OUTPUT:-runs/launched}" "$@"
