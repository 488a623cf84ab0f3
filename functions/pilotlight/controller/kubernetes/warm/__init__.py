"""The pool of warm pods, in the leading controller: their objects and number, claims of single pods
for revisions, and the deletion of promoted pods. What an activator does with a claimed pod is in
`activator/knative`."""
