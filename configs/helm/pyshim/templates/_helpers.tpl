{{- define "pyshim.labels" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- with .root.Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "pyshim.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "pyshim.pull" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "pyshim.shipped" -}}
pykata,pykata-tdx,pykata-snp,pykata-remote,pykata-debug,pykata-warm
{{- end -}}

{{- /* The enabled classes, the usual one first: a node is ready when its test pod runs with that. Own ones come last. */ -}}
{{- define "pyshim.handlers" -}}
{{- $shipped := splitList "," (include "pyshim.shipped" .) -}}
{{- $found := list -}}
{{- range $name := concat $shipped (keys .Values.classes | sortAlpha) | uniq -}}
{{- $class := get $.Values.classes $name -}}
{{- if and (not (has $name $shipped)) (not $class.base) -}}
{{- fail (printf "classes.%s: a class of your own needs the base it starts from, one of %s" $name (join ", " $shipped)) -}}
{{- end -}}
{{- if and (has $name $shipped) $class.base -}}
{{- fail (printf "classes.%s: it comes with pyshim and has no base" $name) -}}
{{- end -}}
{{- if dig "enabled" true $class -}}
{{- $found = append $found $name -}}
{{- end -}}
{{- end -}}
{{- if not $found -}}
{{- fail "no runtime class is enabled: set classes.pykata.enabled or another's" -}}
{{- end -}}
{{- join "," $found -}}
{{- end -}}

{{- /* The enabled classes whose VMs run on nodes. */ -}}
{{- define "pyshim.localHandlers" -}}
{{- $found := list -}}
{{- range $name := splitList "," (include "pyshim.handlers" .) -}}
{{- if ne ((get $.Values.classes $name).base | default $name) "pykata-remote" -}}
{{- $found = append $found $name -}}
{{- end -}}
{{- end -}}
{{- join "," $found -}}
{{- end -}}

{{- /* File name -> settings, of the enabled classes that have some. */ -}}
{{- define "pyshim.settings" -}}
{{- $found := dict -}}
{{- range $name := splitList "," (include "pyshim.handlers" .) -}}
{{- with (get $.Values.classes $name).dropIn -}}
{{- $_ := set $found (printf "%s.toml" $name) . -}}
{{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{- define "pyshim.unprivileged" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end -}}
