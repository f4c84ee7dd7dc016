"""Workers on the nodes of a Ray cluster, which share the memory of a relay on their node.

Ray places a lease for each worker, moves large values, and reports the end of actors and nodes. The
coordinator is the relay of its own node. Decisions about shards and about the lives of workers are
made as for processes of this machine.

On the coordinator's side:
demand           workers and resources that a run needs
cluster          an existing cluster, or a local cluster that ends with the run
sweeper          a process that ends the rest of a local cluster, also after a kill of the run
cluster_life     the processes of Ray that the coordinator depends on, and drained nodes
pool             starts workers on the cluster; the coordinator's ends of workers and relays
servers          the servers, if they own the parameters in place of the coordinator
detached         runs whose coordinator is on the cluster

On a node:
worker_lease     an actor: holds the resources of a worker
relay_actor      an actor: starts the node's workers, has their memory, passes messages on, begins
                 shards ahead of orders
node_sums        results of the node's workers for one step are added

On both sides:
node_facts       facts about a node that must be the same on every node
"""
