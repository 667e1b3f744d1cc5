{{- define "weir.name" -}}{{ .Release.Name }}{{- end -}}

{{- define "weir.instance" -}}{{ .Values.instance | default .Release.Name }}{{- end -}}

{{/* Of what a component is found by; takes (dict "root" $ "component" NAME). */}}
{{- define "weir.selector" -}}
app.kubernetes.io/name: weir
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "weir.labels" -}}
{{ include "weir.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "weir.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "weir.secretPrefix" -}}
{{ .Values.credentials.secretPrefix | default (printf "%s-credentials" .Release.Name) }}
{{- end -}}

{{- define "weir.hasCredentials" -}}
{{- if has .Values.credentials.source (list "secret" "certManager") }}true{{ end -}}
{{- end -}}

{{- define "weir.natsUrl" -}}
{{- $scheme := ternary "tls" "nats" (eq (include "weir.hasCredentials" .) "true") -}}
{{ .Values.nats.url | default (printf "%s://%s-nats:4222" $scheme (include "weir.name" .)) }}
{{- end -}}

{{- define "weir.servesNats" -}}{{- if not .Values.nats.url }}true{{ end -}}{{- end -}}

{{/* A size in Mi of one in Mi or Gi. */}}
{{- define "weir.mebibytes" -}}
{{- if hasSuffix "Gi" . }}{{ mul (trimSuffix "Gi" . | int) 1024 }}{{ else }}{{ trimSuffix "Mi" . | int }}{{ end -}}
{{- end -}}

{{/* Workers, and the transfer service that they share. */}}
{{- define "weir.numHostProcesses" -}}{{ add 1 .Values.hosts.prefill .Values.hosts.decode }}{{- end -}}
