#!/usr/bin/env bash
# All devices of this machine: every GPU, or two processes on the CPU if there is no GPU.
#   launch/local.sh --config configs/image_classification.yaml --batches.micro_batch_size 0
# Put --preflight first to check the machine before training.
# Environment variables: PROCESSES, their number; WHERE, a name in accelerate_configs/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/network.sh

gpus=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | grep -c '^GPU ' || true)
if [ "$gpus" -eq 0 ]; then
    where=${WHERE:-cpu_2_processes} processes=${PROCESSES:-2} device="ACCELERATE_USE_CPU=true"
else
    where=${WHERE:-multi_gpu} processes=${PROCESSES:-$gpus} device="ACCELERATE_MIXED_PRECISION=bf16"
fi
if [ "$processes" -eq 1 ]; then
    where=${WHERE:-$([ "$gpus" -eq 0 ] && echo cpu || echo gpu)}
fi

# The same run without accelerate's launcher, for WHERE=multi_gpu or cpu_2_processes:
echo "equals: $device torchrun --standalone --nproc_per_node $processes -m my_project.train $*"
exec python -m my_project.launch \
    --config_file "accelerate_configs/$where.yaml" --num_processes "$processes" \
    -m my_project.train "$@"
