"""Function pods of a cluster, served by the node agent: a directory for each tenant, and its content.

    <node_path>/<tenant id>/agent.sock             socket on which the tenant's pods announce themselves
                            bundles/<sha256>/      code, hash-verified and unpacked; while a pod needs it
                            weights/<manifest>/    hard links to verified files of the weight cache; while a pod holds it
    <node_path>/warm/agent.sock                    socket of warm pods, which a promotion makes pods of a tenant

The agent has no credentials of the cluster. The kubelet creates a tenant's directory for the first
of its pods on the node, and mounts it read-only into that tenant's pods only.
"""
