"""Function pods of a cluster, as the node agent serves them: a directory for each tenant, and what
its pods may find in it.

    <node_path>/<tenant id>/agent.sock             where the tenant's pods announce themselves
                            bundles/<sha256>/      code, hash-verified and unpacked; while a pod needs it
                            weights/<manifest>/    hard links to verified files of the weight cache; while a pod holds it

The agent has no credentials of the cluster. A tenant's directory is made by the kubelet, for the
first of its pods on the node, and is mounted read-only into that tenant's pods and into nobody
else's."""
