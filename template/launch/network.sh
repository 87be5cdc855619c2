# Settings of NCCL and gloo. Every launcher sources this file on each node.
# Start without any, and uncomment those that preflight or your cluster's documentation names. An
# uncommented line overrides a variable that was set before (sbatch --export, the pod's env).
# shellcheck shell=bash

# ---- interfaces ----------------------------------------------------------------------------------
# The interface between the nodes (ip -br addr lists all). launch.py sets gloo's to the one with the
# route to the main node. NCCL takes prefixes; ^ excludes, = means a whole name.
# export GLOO_SOCKET_IFNAME=eth0
# export NCCL_SOCKET_IFNAME=eth0

# ---- InfiniBand and RoCE -------------------------------------------------------------------------
# export NCCL_IB_DISABLE=1           # use TCP, to find out whether InfiniBand is the cause
# export NCCL_IB_HCA=mlx5            # the adapters (ibstat lists them); =mlx5_0:1 for one port
# export NCCL_IB_GID_INDEX=3         # RoCE v2 on most clusters (show_gids)
# export NCCL_IB_TIMEOUT=22          # for large or busy fabrics; 4 us x 2^22 = 17 s per try
# export NCCL_NET_GDR_LEVEL=SYS      # GPUDirect RDMA at any distance between GPU and adapter

# ---- AWS EFA -------------------------------------------------------------------------------------
# export FI_PROVIDER=efa
# export NCCL_SOCKET_IFNAME=^lo,docker

# ---- inside a node -------------------------------------------------------------------------------
# export NCCL_P2P_DISABLE=1          # if peer-to-peer transfers hang (some consumer boards, IOMMU on)
# export NCCL_SHM_DISABLE=1          # if /dev/shm is too small and cannot be enlarged

# ---- debugging -----------------------------------------------------------------------------------
# export NCCL_DEBUG=INFO             # logs interface and adapter of each rank; WARN: errors only
# export NCCL_DEBUG_SUBSYS=INIT,NET
# export TORCH_DISTRIBUTED_DEBUG=DETAIL  # checks that all ranks call the same collectives; slow

# ---- timeouts ------------------------------------------------------------------------------------
# The limits of a step and of the start are in the config: distributed.timeout_seconds and
# distributed.startup_timeout_seconds. This one is for a run that saves after a stop signal, in seconds:
# export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3600
