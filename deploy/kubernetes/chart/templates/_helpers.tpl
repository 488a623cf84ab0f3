{{- define "pilotlight.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- /* 40 characters at most: the longest suffix and a StatefulSet's number must fit into 63 */ -}}
{{- define "pilotlight.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "pilotlight.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "pilotlight.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* (dict "root" $ "component" "activator") */ -}}
{{- define "pilotlight.selector" -}}
app.kubernetes.io/name: {{ include "pilotlight.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "pilotlight.labels" -}}
{{ include "pilotlight.selector" . }}
app.kubernetes.io/part-of: pilotlight
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- /* a name of an object: (dict "root" $ "component" "activator") → <fullname>-activator */ -}}
{{- define "pilotlight.object" -}}
{{ include "pilotlight.fullname" .root }}-{{ .component }}
{{- end -}}

{{- /* the ClusterRole of what a component may do in a tenant's namespace (pilotlight/kubernetes/rbac.py, tenant_role) */ -}}
{{- define "pilotlight.tenantRole" -}}
{{ printf "%s:%s:tenant" .root.Release.Namespace (include "pilotlight.object" .) }}
{{- end -}}

{{- /* the ClusterRole of what a component may do in the namespace of warm pods (pilotlight/kubernetes/rbac.py, warm_role) */ -}}
{{- define "pilotlight.warmRole" -}}
{{ printf "%s:%s:warm" .root.Release.Namespace (include "pilotlight.object" .) }}
{{- end -}}

{{- /* as the API server names the user that a component's service account is */ -}}
{{- define "pilotlight.user" -}}
{{ printf "system:serviceaccount:%s:%s" .root.Release.Namespace (include "pilotlight.object" .) }}
{{- end -}}

{{- define "pilotlight.tlsSecret" -}}
{{- if eq .root.Values.tls.mode "secrets" -}}
{{- required (printf "tls.secrets.%s: name the secret with tls.crt, tls.key and ca.crt (tls.mode is secrets)" .component) (get .root.Values.tls.secrets .component) -}}
{{- else -}}
{{ include "pilotlight.object" . }}-tls
{{- end -}}
{{- end -}}

{{- /* of a pod that needs no rights on its machine */ -}}
{{- define "pilotlight.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "pilotlight.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "pilotlight.podAnnotations" -}}
checksum/config: {{ include "pilotlight.config" .root | sha256sum }}
{{- with .annotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* files of each of our pods: settings, certificates, and those keys of the secret that it needs:
       (dict "root" $ "component" … "keys" (dict "<key of the secret>" "<file>")) */ -}}
{{- define "pilotlight.volumes" -}}
- name: config
  configMap:
    name: {{ include "pilotlight.fullname" .root }}
- name: tls
  secret:
    secretName: {{ include "pilotlight.tlsSecret" . }}
    defaultMode: 0440
- name: secrets
  secret:
    secretName: {{ .root.Values.secrets.name }}
    defaultMode: 0440
    items:
      {{- range $key, $path := .keys }}
      - key: {{ $key }}
        path: {{ $path }}
      {{- end }}
- name: run
  emptyDir:
    medium: Memory
- name: tmp
  emptyDir: {}
{{- end -}}

{{- define "pilotlight.mounts" -}}
- name: config
  mountPath: /etc/pilotlight/config
  readOnly: true
- name: tls
  mountPath: /etc/pilotlight/tls
  readOnly: true
- name: secrets
  mountPath: /etc/pilotlight/secrets
  readOnly: true
- name: run
  mountPath: /run/pilotlight
- name: tmp
  mountPath: /tmp
{{- end -}}

{{- define "pilotlight.imagePullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{- /* where a pod runs: values of its section */ -}}
{{- define "pilotlight.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{- define "pilotlight.env" -}}
- name: TMPDIR
  value: /tmp
- name: HOME
  value: /tmp
- name: PYTHONUNBUFFERED
  value: "1"
{{- with .extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "pilotlight.s3" -}}
{{- with .Values.s3.secretName }}
envFrom:
  - secretRef:
      name: {{ . }}
{{- end }}
{{- end -}}
