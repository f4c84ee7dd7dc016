"""Workers on the nodes of a Ray cluster: worker processes that an actor each starts and passes on.

Ray places actors, moves what is large, and tells when an actor or a node is gone. Which worker
computes what, and what becomes of a worker, is decided as for processes of this machine.

On the coordinator's side:
demand      what a run asks of a cluster
cluster     the cluster: one that is there, or a local one that ends with the run
sweeper     a process that ends what a local cluster leaves, also after the run was killed
site        starts workers there
published   what workers compute from, in the object store once
servers     the servers, if they have the parameters in the coordinator's place
hand        one worker: what is sent to its agent, and what comes from there
near        one on the coordinator's own node, which has its memory, and a wire to it
open_job    what it knows of a job: what is ordered, and what is likely to follow
results     how what others have computed comes into the coordinator's memory
node_sums   which results of a node wait for each other, to be added there
own_node    whether the processes of Ray live that the coordinator cannot do without
notices     which nodes are to go, and whether the cluster is there

On a node:
agent       an actor: one worker process, its memory, and what is passed on
adding      adds results of the node's workers
pushed      gradients on their way from an agent to the servers
server      an actor: a slice of the parameters

On both:
relayed     what travels
"""
