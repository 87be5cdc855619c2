# Settings of NCCL and gloo for the network between the nodes. The scripts in launch/ source this
# file on each node; before a command by hand, run `source launch/network.sh`.
#
# First leave all of them commented out: NCCL finds the network itself, and NCCL_DEBUG=INFO (below)
# says which one it uses. Uncomment what the preflight or your cluster's documentation names. An
# uncommented line overrides a variable that was set before (sbatch --export, the pod's env).
#
# | network    | NCCL needs                                              | NCCL_DEBUG=INFO says |
# |------------|---------------------------------------------------------|----------------------|
# | InfiniBand | nothing [1]; no limit on pinned memory, ulimit -l [2]   | Using network IB     |
# | RoCE       | the same; often a traffic class, NCCL_IB_TC [2]         | Using network IB     |
# | AWS EFA    | the plugin aws-ofi-nccl 1.7 or newer [3]; otherwise TCP | NET/OFI              |
# | TCP        | if there are several interfaces, the right one [2]      | Using network Socket |
#
# This file does not cover Google Cloud (gVNIC with GPUDirect-TCPX, TCPXO or RDMA, which need a
# different plugin, libraries and variables for each kind of machine, from Google's installer),
# Azure (topology files for its InfiniBand machines), and rails (several parallel networks, which
# need NCCL_CROSS_NIC and the cluster's plan of adapters). For these use what the provider's
# documentation or image sets.
#
# We have not run InfiniBand, RoCE, EFA, or NCCL over TCP, since we never had two GPUs. We ran gloo
# over TCP. A number in brackets names the source of a value; we read the sources in November 2026:
# [1] https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
# [2] https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html and its pages
# [3] https://github.com/aws/aws-ofi-nccl/blob/master/doc/efa-env-var.md
# [4] https://pytorch.org/docs/stable/distributed.html
# shellcheck shell=bash

# ---- TCP, by which NCCL connects on every network ------------------------------------------------
# The interface between the nodes (ip -br addr lists all). The launcher sets gloo's interface to the
# one with the route to the main node. NCCL takes prefixes; = means a whole name, ^ excludes. By
# default it uses neither lo nor docker*, and prefers ib* [1].
# export GLOO_SOCKET_IFNAME=eth0     # [4]
# export NCCL_SOCKET_IFNAME==eth0    # [1] the second = is part of the value
# export NCCL_SOCKET_NTHREADS=4      # [1] for 100 Gb/s; the default is 1, on AWS 2
# export NCCL_NSOCKS_PERTHREAD=4     # [1] with the line above; the product is at most 64

# ---- InfiniBand and RoCE -------------------------------------------------------------------------
# export NCCL_IB_HCA==mlx5_0,mlx5_1  # [1] the adapters to use (ibstat lists them); :1 is a port
# export NCCL_IB_TIMEOUT=22          # [1] for error 12 on large networks: 17 s per try, not 4 s
# export NCCL_IB_DISABLE=1           # [1] use TCP, to find out whether InfiniBand is the cause

# ---- RoCE ----------------------------------------------------------------------------------------
# NCCL chooses the GID; since NCCL 2.21 the documentation says not to set NCCL_IB_GID_INDEX [2].
# export NCCL_IB_TC=106              # [2] an example: your network's documentation has the number

# ---- AWS EFA -------------------------------------------------------------------------------------
# FI_PROVIDER=efa and NCCL_PROTO=simple are for aws-ofi-nccl 1.5 and older,
# FI_EFA_USE_DEVICE_RDMA=1 for versions before 1.7 [3].
# export NCCL_NET_PLUGIN=ofi         # [1] if the plugin is installed, but NCCL does not find it
# export FI_EFA_USE_HUGE_PAGE=0      # [3] if loader workers fail with "Cannot allocate memory"

# ---- inside a node -------------------------------------------------------------------------------
# export NCCL_P2P_DISABLE=1          # [1] if transfers between GPUs hang: PCI ACS, IOMMU [2]
# export NCCL_SHM_DISABLE=1          # [1] if /dev/shm is too small and cannot be enlarged

# ---- only for debugging [1] ----------------------------------------------------------------------
# export NCCL_DEBUG=INFO             # [1] the network and adapters of each rank; WARN: errors only
# export NCCL_DEBUG_SUBSYS=INIT,NET  # [1]
# export TORCH_DISTRIBUTED_DEBUG=DETAIL  # [4] checks that ranks call the same collectives; slow

# ---- timeouts ------------------------------------------------------------------------------------
# The limits of a step and of the start are in the config: distributed.timeout_seconds and
# distributed.startup_timeout_seconds. The variable below is for accelerate launch and torchrun,
# from torch 2.12: how many seconds they let a run save after a stop signal.
# export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3600
