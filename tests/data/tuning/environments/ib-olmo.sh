export NCCL_DEBUG="INFO"
export NCCL_IB_HCA="^=mlx5_bond_0"
export NCCL_SOCKET_IFNAME="ib"
