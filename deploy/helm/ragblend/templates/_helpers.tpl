{{- define "ragblend.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 46 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 46 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "ragblend.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "ragblend.labels" -}}
{{ include "ragblend.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* An environment variable from a secret that the user names: (list NAME VALUE) */}}
{{- define "ragblend.fromSecret" -}}
{{- $secret := index . 1 -}}
{{- if $secret.secretName }}
- name: {{ index . 0 }}
  valueFrom:
    secretKeyRef: {name: {{ $secret.secretName | quote }}, key: {{ $secret.key | quote }}}
{{- end }}
{{- end }}

{{/* What a claim asks for: the value of `store` or `cache` */}}
{{- define "ragblend.claim" -}}
{{- with .storageClassName }}
storageClassName: {{ . | quote }}
{{- end }}
accessModes: [{{ if eq .kind "shared" }}ReadWriteMany{{ else }}ReadWriteOnce{{ end }}]
resources: {requests: {storage: {{ .size }}}}
{{- end }}
