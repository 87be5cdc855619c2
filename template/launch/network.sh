# Settings of NCCL and gloo, for every launcher: each sources this file on each node.
# All are comments: start without them, and uncomment what preflight or your cluster's guide names.
# What is set before (sbatch --export, the pod's env) is overwritten by a line that is uncommented.
# shellcheck shell=bash

# ---- interfaces ----------------------------------------------------------------------------------
# By which the nodes reach each other (ip -br addr lists them). launch.py chooses gloo's by the route
# to the main node. NCCL takes a prefix, ^ for all but, = for a whole name.
# export GLOO_SOCKET_IFNAME=eth0
# export NCCL_SOCKET_IFNAME=eth0

# ---- InfiniBand and RoCE -------------------------------------------------------------------------
# export NCCL_IB_DISABLE=1           # use TCP, to see whether InfiniBand is the fault
# export NCCL_IB_HCA=mlx5            # which adapters (ibstat lists them); =mlx5_0:1 for one port
# export NCCL_IB_GID_INDEX=3         # RoCE v2 on most clusters (show_gids)
# export NCCL_IB_TIMEOUT=22          # for large or busy fabrics; 4 us x 2^22 = 17 s per try
# export NCCL_NET_GDR_LEVEL=SYS      # GPU memory straight to the adapter, however far apart they are

# ---- AWS EFA -------------------------------------------------------------------------------------
# export FI_PROVIDER=efa
# export NCCL_SOCKET_IFNAME=^lo,docker

# ---- inside a node -------------------------------------------------------------------------------
# export NCCL_P2P_DISABLE=1          # if GPUs hang on each other (some consumer boards, IOMMU on)
# export NCCL_SHM_DISABLE=1          # if /dev/shm is too small and cannot be made larger

# ---- to see what happens -------------------------------------------------------------------------
# export NCCL_DEBUG=INFO             # which interface and adapter each process takes; WARN: only faults
# export NCCL_DEBUG_SUBSYS=INIT,NET
# export TORCH_DISTRIBUTED_DEBUG=DETAIL  # checks that all processes call the same collectives; slow

# ---- timeouts ------------------------------------------------------------------------------------
# How long a step or a start-up may take is the config's: distributed.timeout_seconds and
# distributed.startup_timeout_seconds. How long a run that is told to stop may take to save:
# export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3600
