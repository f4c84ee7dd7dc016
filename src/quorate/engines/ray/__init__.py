"""Workers on the nodes of a Ray cluster: an actor starts each worker process, and passes it on.

Ray places actors, moves large values, and reports the end of actors and nodes. Decisions about
shards and about the lives of workers are made as for processes of this machine.

On the coordinator's side:
demand           workers and resources that a run needs
cluster          an existing cluster, or a local cluster that ends with the run
connection       this process as a driver of a cluster
sweeper          a process that ends the rest of a local cluster, also after a kill of the run
pool             starts workers on the cluster
parameter_store  values that workers compute from, in the object store
servers          the servers, if they own the parameters in place of the coordinator
worker_handle    the coordinator's end of a worker's actor
handover         workers on the coordinator's own node: shared memory, and a wire
node_results     brings results of all nodes into the coordinator's memory
own_node         the processes of Ray that the coordinator depends on
notices          drained nodes, and the end of the cluster
detached         runs whose coordinator is on the cluster

On a node:
worker_actor     an actor: a worker process and its memory; passes messages on
node_adder       adds results of the node's workers
gradient_pusher  gradients on their way from an actor to the servers

On both sides:
images           contents of calls
shard_orders     orders of shards, and the shards that are likely to follow
"""
