"""What Knative's webhook and schema would say of a Service, said before it is sent: each refusal
with its field and what to do.

Restated from knative/serving after v1.23 (pkg/apis/serving/k8s_validation.go, fieldmask.go,
v1/*_validation.go, config/core/300-resources). `services.check` is the entry; it is pure."""
