{{/* `from` or `to` the pods of a component; takes (dict "root" $ "component" NAME). */}}
{{- define "weir.peer" -}}
podSelector: {matchLabels: {app.kubernetes.io/name: weir, app.kubernetes.io/instance: {{ .root.Release.Name }}, app.kubernetes.io/component: {{ .component }}}}
{{- end -}}

{{/* A policy's head. */}}
{{- define "weir.policy" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "weir.name" .root }}-{{ .component }}
  labels:
    {{- include "weir.labels" . | nindent 4 }}
spec:
  podSelector:
    matchLabels:
      {{- include "weir.selector" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
{{- end -}}

{{/* Egress that all of Weir's processes have: NATS, and what the values add. */}}
{{- define "weir.commonEgress" -}}
{{- if include "weir.servesNats" . }}
- to: [{ {{- include "weir.peer" (dict "root" . "component" "nats") -}} }]
  ports: [{port: 4222, protocol: TCP}]
{{- end }}
{{- with .Values.networkPolicy.egress }}
{{ toYaml . }}
{{- end }}
{{- end -}}
