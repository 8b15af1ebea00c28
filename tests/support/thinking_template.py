"""A chat template in the form of Qwen3.5's: tools, a switch for thinking, earlier thoughts shown on request.

Written with `[` and `]` for turns and without line ends, so that the tiny models' tokenizer (printable ASCII) can spell
all of it; the tokens that begin and end a text are the model's own.
"""

THINKING_TEMPLATE = """
{%- macro shown(content) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}
            {%- if 'text' in part %}{{- part.text }}{% else %}{{- raise_exception('Text alone is shown.') }}{% endif %}
        {%- endfor %}
    {%- elif content is not none and content is defined %}
        {{- raise_exception('Content must be text.') }}
    {%- endif %}
{%- endmacro %}
{%- set asked = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- if asked.last < 0 %}{{- raise_exception('Nobody asked anything.') }}{% endif %}
{{- bos_token }}
{%- if tools %}
    {{- '[system]<tools>' }}
    {%- for tool in tools %}{{- tool | tojson }}{% endfor %}
    {{- '</tools>' }}
    {%- if messages[0].role == 'system' %}{{- shown(messages[0].content) }}{% endif %}
    {{- eos_token }}
{%- elif messages[0].role == 'system' %}
    {{- '[system]' + shown(messages[0].content) + eos_token }}
{%- endif %}
{%- for message in messages %}
    {%- set content = shown(message.content) | trim %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{- raise_exception('The system message comes first.') }}{% endif %}
    {%- elif message.role == 'user' %}
        {{- '[user]' + content + eos_token }}
    {%- elif message.role == 'assistant' %}
        {%- set thoughts = message.reasoning_content if message.reasoning_content is string else '' %}
        {{- '[assistant]' }}
        {%- if preserve_thinking is true or loop.index0 > asked.last %}
            {{- '<think>' + thoughts | trim + '</think>' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '<tool_call><function=' + call.name + '>' }}
            {%- for name, value in call.arguments | items %}
                {{- '<parameter=' + name + '>' }}
                {{- value if value is string else value | tojson }}
                {{- '</parameter>' }}
            {%- endfor %}
            {{- '</function></tool_call>' }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem is undefined or loop.previtem.role != 'tool' %}{{- '[user]' }}{% endif %}
        {{- '<tool_response>' + content + '</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- eos_token }}{% endif %}
    {%- else %}
        {{- raise_exception('Nobody is called ' + message.role + '.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[assistant]<think>' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '</think>' }}{% endif %}
{%- endif %}
"""
